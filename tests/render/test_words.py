"""Numbers and names as people read them."""

import pytest

from stepscope.render.words import clean, counted, number, share, steps_phrase


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not observed"),
        (True, "yes"),
        (0, "0"),
        (9999, "9999"),
        (65536.0, "65\u202f536"),
        (-1234567, "-1\u202f234\u202f567"),
        (12850.4, "12\u202f850"),
        (0.000123456, "0.0001235"),
        (float("nan"), "NaN"),
        (float("-inf"), "-infinity"),
        ("Infinity", "Infinity"),
        ([1, 2.5], "1, 2.5"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_share_never_rounds_a_few_to_none_or_nearly_all_to_all():
    assert share(0.0) == "0 %"
    assert share(1e-5) == "under 0.1 %"
    assert share(0.99999) == "over 99.9 %"
    assert share(1.0) == "100 %"
    assert share(1 / 3) == "33.3 %"


@pytest.mark.parametrize("sign", ["\x1b", "\x00", "\x9b", "\u202e", "\u2066", "\u200b", "\ufeff", "\ud800", "\x7f"])
def test_clean_spells_out_what_steers_a_terminal_or_reorders_a_line(sign):
    assert clean(f"a{sign}b") == f"a<U+{ord(sign):04X}>b"


def test_clean_keeps_letters_of_every_script_and_line_ends():
    text = "学习率 λ שלום\n\tx"
    assert clean(text) == text


def test_phrases():
    assert counted(1, "error") == "1 error"
    assert counted(0, "error") == "0 errors"
    assert steps_phrase(None, None) == "whole run"
    assert steps_phrase(3, 3) == "micro-step 3"
    assert steps_phrase(3, 12) == "micro-steps 3 to 12"
