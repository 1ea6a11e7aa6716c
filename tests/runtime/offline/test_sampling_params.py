"""Validation of the offline ``SamplingParams``."""

import math

import pytest

from skiff_runtime import SamplingParams
from skiff_runtime.errors import InvalidRequest


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"top_p": 0.0}, "top_p must be a number above 0.0 and at most 1.0"),
        ({"temperature": -1.0}, "temperature must be a number from 0.0 to 2.0"),
        ({"temperature": 2.1}, "temperature must be a number from 0.0 to 2.0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": math.nan}, "temperature must be a number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5"),
        ({"seed": 1 << 63}, "seed must be a whole number"),
        ({"top_k": 1 << 40}, "top_k must be a whole number"),
        ({"top_k": -2}, "top_k must be a whole number from -1"),
        ({"n": 0}, "n must be a whole number"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"presence_penalty": 3}, "presence_penalty must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"logit_bias": {1: 101}}, "logit_bias maps"),
        ({"logit_bias": {"1": 5}}, "logit_bias maps"),
        ({"stop": "one"}, "stop must be a tuple of strings"),
        ({"stop": ("",)}, "stop must be a tuple of strings, none of them empty"),
        ({"stop": ("x",) * 17}, "stop has 17 entries"),
        ({"stop": ("x" * 257,)}, "stop has 256 characters at most"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids must be a tuple of token ids"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a tuple of token ids"),
        ({"choice": ("a",), "regex": "a"}, "give only one of regex and choice"),
        ({"choice": ()}, "choice must be a tuple of strings"),
        ({"json_schema": 5}, "json_schema cannot be 5"),
    ],
)
def test_invalid_parameter_is_named(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(options))
