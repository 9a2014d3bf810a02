"""One unit: its declaration, its call, and its use under another name."""

from __future__ import annotations

import pytest

from dsplit.errors import UnitError
from dsplit.units import unit


@unit(outputs="prompt_embeds prompt_mask", components="text_encoder", version=3, shapes={"prompt_embeds": "L, 8"},
      dtypes={"prompt_mask": "bool"})  # fmt: skip
def encode_prompt(prompt, text_encoder):
    return [text_encoder * len(p) for p in prompt], [bool(p) for p in prompt]


def test_a_declared_unit() -> None:
    assert encode_prompt.name == encode_prompt.identity == "encode_prompt"
    assert encode_prompt.inputs == ("prompt",)
    assert encode_prompt.outputs == ("prompt_embeds", "prompt_mask")
    assert encode_prompt.components == ("text_encoder",)
    assert (encode_prompt.version, encode_prompt.random) == (3, False)
    result = encode_prompt({"prompt": ["ab", ""], "unread": 1}, {"text_encoder": 10, "vae": 5})
    assert result == {"prompt_embeds": [20, 0], "prompt_mask": [True, False]}


def test_renamed_values_compute_the_same_and_keep_their_key_names() -> None:
    negative = encode_prompt.renamed(
        "encode_negative_prompt", prompt="negative_prompt", prompt_embeds="negative_embeds", prompt_mask="negative_mask"
    )
    assert (negative.name, negative.identity, negative.version) == ("encode_negative_prompt", "encode_prompt", 3)
    assert negative.inputs == ("negative_prompt",)
    assert negative.shapes == {"negative_embeds": "L, 8"}
    assert negative.dtypes == {"negative_mask": "bool"}
    assert [negative.stored_name(o) for o in negative.outputs] == ["prompt_embeds", "prompt_mask"]
    assert negative({"negative_prompt": ["abc"]}, {"text_encoder": 2}) == {
        "negative_embeds": [6],
        "negative_mask": [True],
    }


def test_renaming_twice_goes_back_to_the_origin() -> None:
    twice = encode_prompt.renamed("a", prompt="p", prompt_embeds="e").renamed("b", p="q", e="f", prompt_mask="m")
    assert (twice.name, twice.identity) == ("b", "encode_prompt")
    assert [twice.stored_name(o) for o in twice.outputs] == ["prompt_embeds", "prompt_mask"]
    assert twice({"q": ["abcd"]}, {"text_encoder": 1}) == {"f": [4], "m": [True]}


def test_renaming_an_unknown_value() -> None:
    with pytest.raises(UnitError, match="unit 'encode_prompt' has no value named promt"):
        encode_prompt.renamed("a", promt="p")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ((1, 2, 3), "unit 'wrong' returned 3 values, but declares 2: a, b"),
        (1, "returned 1 values, but declares 2"),
        ([1, 2], "returned 1 values, but declares 2"),
        (None, "returned 1 values, but declares 2"),
        ((1, None), "unit 'wrong' returned None for b"),
    ],
)
def test_a_call_checks_that_the_declared_outputs_came_back(result, text) -> None:
    @unit(outputs="a b")
    def wrong(image):
        return result

    with pytest.raises(UnitError) as caught:
        wrong({"image": 0}, {})
    assert text in str(caught.value)


def test_a_forgotten_return_is_found() -> None:
    @unit(outputs="a")
    def forgetful(image):
        image + 1

    with pytest.raises(UnitError, match="unit 'forgetful' returned None for a"):
        forgetful({"image": 0}, {})


def plain(image, vae): ...
def drawing(image, rng): ...
def starred(*image): ...
def keywords(image, **more): ...
def positional(image, /): ...


@pytest.mark.parametrize(
    ("function", "declared", "text"),
    [
        (plain, {"outputs": ""}, "declares no output"),
        (plain, {"outputs": "a a"}, "a value is written once"),
        (plain, {"outputs": "image"}, "by a unit that does not read it"),
        (plain, {"outputs": "a", "components": "vae tokenizer"}, "components tokenizer, but takes no such parameter"),
        (plain, {"outputs": "a", "shapes": {"b": "H"}}, "describes b, which it does not make"),
        (plain, {"outputs": "a", "dtypes": {"c": "bool"}}, "describes c, which it does not make"),
        (drawing, {"outputs": "a"}, "draws from rng; declare it random=True"),
        (starred, {"outputs": "a"}, "name every value"),
        (keywords, {"outputs": "a"}, "name every value"),
        (positional, {"outputs": "a"}, "name every value"),
    ],
)
def test_a_declaration_that_disagrees_with_the_function(function, declared, text) -> None:
    with pytest.raises(UnitError) as caught:
        unit(**declared)(function)
    assert f"unit '{function.__name__}'" in str(caught.value)
    assert text in str(caught.value)
