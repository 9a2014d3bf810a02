"""Shape formulas: their values, their ragged axis, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsplit.errors import UnitError
from dsplit.shapes import evaluate, ragged_axis

NAMES = {"H": 96, "W": 64, "F": 5, "L": 7, "vae.z_dim": 16, "text_encoder.text_config.hidden_size": 3584}


@pytest.mark.parametrize(
    ("formula", "shape"),
    [
        ("3, H, W", (3, 96, 64)),
        ("vae.z_dim, 1, H/8, W/8", (16, 1, 12, 8)),
        ("vae.z_dim, (F - 1)/4 + 1, H/8, W/8", (16, 2, 12, 8)),
        ("L, text_encoder.text_config.hidden_size", (7, 3584)),
        ("(H/16) * (W/16), 4*vae.z_dim", (24, 64)),
        ("H//8", (12,)),
        ("W - L", (57,)),
        ("", ()),
    ],
)
def test_values(formula: str, shape: tuple[int, ...]) -> None:
    assert evaluate(formula, NAMES) == shape


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_division_rounds_down(height: int, factor: int) -> None:
    assert evaluate(f"H/{factor}", {"H": height}) == (height // factor,)


@pytest.mark.parametrize(
    ("formula", "axis"),
    [("L, 8", 0), ("3, H, W", None), ("8, 2*L + 1", 1), ("L", 0), ("vae.L", None), ("", None)],
)
def test_ragged_axis(formula: str, axis: int | None) -> None:
    assert ragged_axis(formula) == axis


@pytest.mark.parametrize(
    ("formula", "named"),
    [
        ("C, H", "C"),
        ("vae.channels", "vae.channels"),
        ("H ** 2", "H ** 2"),
        ("-1", "-1"),
        ("1.5", "1.5"),
        ("max(H, W)", "max(H, W)"),
        ("__import__('os').getpid()", "__import__"),
        ("H, (1, 2)", "(1, 2)"),
        ("H / (L - 7)", "zero"),
    ],
)
def test_what_a_formula_cannot_say(formula: str, named: str) -> None:
    with pytest.raises(UnitError) as caught:
        evaluate(formula, NAMES)
    assert f"shape formula '{formula}'" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("formula", ["H,, W", "H W", "3 +", "(H"])
def test_a_formula_that_cannot_be_read(formula: str) -> None:
    for use in (lambda: evaluate(formula, NAMES), lambda: ragged_axis(formula)):
        with pytest.raises(UnitError, match="shape formula"):
            use()


def test_a_name_without_a_number() -> None:
    with pytest.raises(UnitError, match=r"shape formula 'vae\.z_dim'"):
        evaluate("vae.z_dim", {"vae.z_dim": None})
