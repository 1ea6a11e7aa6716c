"""Stop strings end the text where a search of the whole text would, wherever tokens divide it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.tokenizer.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="ab🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=6), min_size=1, max_size=4)


def naive(text: str, stops: list[str], *, include: bool = False) -> tuple[str, bool]:
    """Return the text before (or with) the stop string that ends first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


def streamed(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    matcher = StopStringMatcher(tuple(stops), include=include)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.stopped:
            return shown, True
    return [*shown, matcher.flush()], False


@settings(max_examples=1000, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=10), stops=STOPS, include=st.booleans())
def test_text_equals_that_of_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    shown, stopped = streamed(pieces, stops, include=include)
    assert ("".join(shown), stopped) == naive("".join(pieces), stops, include=include)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=10), stops=STOPS)
def test_no_text_is_held_back_if_stop_strings_are_included(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = streamed(pieces, stops, include=True)
    before = shown[: len(shown) - 1]
    assert before == pieces[: len(before)]
    assert stopped or shown[-1] == ""


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=10), stops=STOPS)
def test_held_back_text_is_the_longest_possible_start_of_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopStringMatcher(tuple(stops))
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if matcher.stopped:
            return
        held = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert shown == text[: len(text) - held]


def test_stop_string_across_three_tokens_is_found() -> None:
    shown, stopped = streamed(["one ##", "#", "# two"], ["####"])
    assert (shown, stopped) == (["one ", "", ""], True)
