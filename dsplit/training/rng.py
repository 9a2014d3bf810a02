"""Counted randomness: every draw is a function of (seed, row id, visit, purpose), never of what was drawn before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch


def derived(*parts: object) -> int:
    """A seed in [0, 2^32) made of `parts`: 32 bits are all that torch's CPU generator looks at."""
    return int.from_bytes(_digest(parts, 4), "big")


def sort_key(*parts: object) -> bytes:
    """16 bytes made of `parts`: what is sorted by them stands in a random order."""
    return _digest(parts, 16)


def variant(seed: int, row_id: str, visit: int, axis: str, count: int) -> int:
    """Which of `count` variants of `axis` a row has at a visit: in [0, count).

    A random order of all of them for each `count` visits in turn, so that all are used equally often.
    """
    cycle, place = divmod(visit, count)
    return sorted(range(count), key=lambda k: sort_key(seed, "variant", axis, row_id, cycle, k))[place]


def chance(seed: int, row_id: str, visit: int, purpose: str) -> float:
    """Uniform in [0, 1): what is done with probability p is done where this is below p."""
    return (int.from_bytes(_digest((seed, row_id, visit, purpose), 8), "big") >> 11) / 2**53


def _digest(parts: Sequence[object], size: int) -> bytes:
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=size).digest()


@dataclass(frozen=True)
class Rng:
    """The draws of one batch: row `ids[k]` at its visit `visits[k]`.

    Drawn on the CPU in fp32, then moved: a row's draw depends neither on its batch nor on the device.
    """

    seed: int
    ids: Sequence[str]
    visits: Sequence[int]

    def draw(self, purpose: str, one: Callable[[torch.Generator], torch.Tensor]) -> torch.Tensor:
        """`one(generator)` of each row, stacked: (B, ...)."""
        return torch.stack([one(self._generator(purpose, k)) for k in range(len(self.ids))])

    def normal(self, purpose: str, like: torch.Tensor) -> torch.Tensor:
        """Unit normal noise, fp32, of the shape and on the device of `like` (B, ...)."""
        return self.draw(purpose, lambda g: torch.randn(like.shape[1:], generator=g)).to(like.device)

    def uniform(self, purpose: str) -> torch.Tensor:
        """Uniform in [0, 1): (B,), fp32, on the CPU."""
        return self.draw(purpose, lambda g: torch.rand((), generator=g))

    def seeded(
        self,
        seeds: Sequence[int | None],
        rand_devices: Sequence[str | None],
        like: torch.Tensor,
        *,
        fixed: bool = False,
    ) -> torch.Tensor:
        """Noise from the rows' own seeds, fp32, of the shape and on the device of `like` (B, ...).

        Equals the noise that a diffusers pipeline draws for one picture with `torch.Generator(rand_device)` at that
        seed, in the dtype of `like`. A row without a seed gets noise of its visit; `fixed`: the same at each visit.
        """
        rows = []
        for k, (seed, rand_device) in enumerate(zip(seeds, rand_devices, strict=True)):
            if seed is None:
                noise = torch.randn(like.shape[1:], generator=self._generator("noise", k, fixed=fixed))
            else:
                generator = torch.Generator(rand_device or "cpu").manual_seed(seed)
                noise = torch.randn(like.shape[1:], generator=generator, device=generator.device, dtype=like.dtype)
            rows.append(noise.to(like.device).float())
        return torch.stack(rows)

    def _generator(self, purpose: str, k: int, *, fixed: bool = False) -> torch.Generator:
        """The visit is added, not hashed: so two visits of a row cannot share a seed by chance."""
        visit = 0 if fixed else self.visits[k]
        return torch.Generator().manual_seed((derived(self.seed, self.ids[k], purpose) + visit) % 2**32)
