"""Counted randomness: what a draw depends on, and what it does not."""

import pytest
import torch
from diffusers import QwenImagePipeline

from dsplit.training.rng import Rng, derived, sort_key

LIKE = torch.zeros(1, 16, 1, 8, 8)


def one(row: str, visit: int = 0, seed: int = 0) -> Rng:
    return Rng(seed, [row], [visit])


def test_a_rows_noise_does_not_depend_on_its_batch():
    batch = Rng(0, ["a", "b", "c"], [4, 5, 6]).normal("noise", LIKE.expand(3, -1, -1, -1, -1))
    for k, (row, visit) in enumerate([("a", 4), ("b", 5), ("c", 6)]):
        assert torch.equal(batch[k], one(row, visit).normal("noise", LIKE)[0])


def test_noise_differs_by_seed_row_visit_and_purpose():
    draws = [
        one("a").normal("noise", LIKE),
        one("a", seed=1).normal("noise", LIKE),
        one("b").normal("noise", LIKE),
        one("a", visit=1).normal("noise", LIKE),
        one("a").normal("other", LIKE),
    ]
    assert all(not torch.equal(x, y) for k, x in enumerate(draws) for y in draws[:k])
    assert abs(draws[0].mean()) < 0.15
    assert abs(draws[0].std() - 1) < 0.15


def test_no_two_of_ten_thousand_visits_of_a_row_share_noise():
    firsts = {one("a", visit).uniform("sigma").item().hex() for visit in range(10_000)}
    like = torch.zeros(1, 4)
    noises = {tuple(one("a", visit).normal("noise", like)[0].tolist()) for visit in range(10_000)}
    assert len(noises) == 10_000
    assert len(firsts) > 9_990  # 24-bit floats: a few equal values are expected, equal streams are not


def test_noise_is_fp32_whatever_the_latents_are():
    exact = one("a").normal("noise", LIKE)
    drawn = one("a").normal("noise", LIKE.bfloat16())
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn, exact)
    assert one("a").uniform("sigma").dtype == torch.float32


def test_draws_leave_torchs_own_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one("a").normal("noise", LIKE)
    one("a").seeded([1], ["cpu"], LIKE)
    sort_key(9, "x")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_seeded_noise_is_what_the_pipeline_draws(dtype):
    pipeline = QwenImagePipeline(None, None, None, None, None)
    generator = torch.Generator("cpu").manual_seed(7)
    packed = pipeline.prepare_latents(1, 16, 64, 96, dtype, "cpu", generator)
    expected = QwenImagePipeline._unpack_latents(packed, 64, 96, 8)
    like = torch.zeros(2, 16, 1, 8, 12, dtype=dtype)
    noise = Rng(0, ["a", "b"], [0, 3]).seeded([8, 7], ["cpu", "cpu"], like)
    assert noise.dtype == torch.float32
    assert torch.equal(noise[1:], expected.float())
    assert not torch.equal(noise[0], noise[1])


def test_rows_without_a_seed_get_new_noise_at_each_visit_unless_fixed():
    first, second = (one("a", visit).seeded([None], [None], LIKE) for visit in (0, 1))
    assert not torch.equal(first, second)
    fixed = [one("a", visit).seeded([None], [None], LIKE, fixed=True) for visit in (0, 1)]
    assert torch.equal(fixed[0], fixed[1])
    assert torch.equal(fixed[0], first)


def test_sort_keys_shuffle_and_are_repeatable():
    keys = [sort_key(1, "order", f"row{i}", 0) for i in range(1000)]
    assert len(set(keys)) == 1000
    assert keys[0] == sort_key(1, "order", "row0", 0)
    assert keys[0] != sort_key(1, "order", "row0", 1)
    order = sorted(range(1000), key=keys.__getitem__)
    assert abs(sum(order[:500]) / 500 - 499.5) < 60  # no half is made of low numbers


def test_derived_separates_its_parts():
    assert derived("ab", "c") != derived("a", "bc")
    assert 0 <= derived(0, "lora") < 2**32
