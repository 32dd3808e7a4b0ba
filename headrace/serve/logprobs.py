"""The JSON of log-probabilities: of chats, of texts, and of prompts as vLLM has them."""

from collections.abc import Callable, Sequence

from headrace.generate.uses.scores import ScoredTokens
from headrace.serve.tools.dialect import Json

Words = Callable[[int], str]
"""What makes the text of a token."""


def of_chat(scored: Sequence[ScoredTokens], words: Words) -> Json:
    """Return the tokens of a message, each with the likeliest in its place."""

    def entry(token: int, logprob: float | None) -> Json:
        text = words(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    tops = [[entry(*each) for each in found.top] for found in scored]
    entries = [entry(found.token, found.logprob) for found in scored]
    return {"content": [each | {"top_logprobs": top} for each, top in zip(entries, tops, strict=True)], "refusal": None}


def of_text(scored: Sequence[ScoredTokens], words: Words, offset: int) -> Json:
    """Return the tokens of a text that begins at character `offset`. The token itself is among the likeliest. Of tokens with
    the same text the likeliest counts.
    """
    texts = [words(each.token) for each in scored]
    starts = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
    tops = [
        None if each.logprob is None else {words(token): value for token, value in reversed(_with_own(each))} for each in scored
    ]
    logprobs = [each.logprob for each in scored]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": starts}


def of_prompt(scored: Sequence[ScoredTokens], words: Words) -> list[Json | None]:
    """Return the tokens of a prompt, by their ids; None for the first, which nothing predicts."""
    found = list[Json | None]()
    for each in scored:
        ranks = {token: place for place, (token, _) in enumerate(each.top, start=1)} | {each.token: each.rank}
        entries = {
            str(token): {"logprob": value, "rank": ranks[token], "decoded_token": words(token)}
            for token, value in _with_own(each)
        }
        found.append(None if each.logprob is None else entries)
    return found


def _with_own(scored: ScoredTokens) -> list[tuple[int, float | None]]:
    own = [] if scored.token in dict(scored.top) else [(scored.token, scored.logprob)]
    return [*scored.top, *own]
