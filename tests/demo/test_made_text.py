"""The text of the demo's made model."""

from made_model import texts


def test_the_text_is_whole_however_often_it_is_asked_for() -> None:
    first = list(texts())
    assert first[0].startswith("The Zen of Python")
    assert len(first) > 10
    assert list(texts()) == first
