"""Where the assistant speaks in the text that a chat template makes of a conversation.

If the template marks the assistant's words by `{% generation %}`, the template decides. Otherwise each turn is found by
rendering the conversation up to it, with and without it. Or it is found by its header, its words and the mark that ends it.

The invariant: the data says what may be trained, the template only how it looks. A stretch holds the words of its own turn and
the turn's end. It holds nothing of another message, a header or a system message. All of it is compared as text. A sample for
which this cannot be shown is left out, and nothing is guessed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.data.chat.chat_template import Stretch, Template
from headrace.data.chat.words import Words, find_words
from headrace.data.values.messages import Messages, unread_fields

_NO_END = (
    "by its {% generation %} tags, the chat template trains no mark that ends a turn, so the model does not learn to end. "
    "Put {% endgeneration %} behind that mark"
)
_HAS_NO_END = "the chat template prints no mark at the end of the last turn, so the model may not learn to end"
_SAYS_LESS = "by its {% generation %} tags, the chat template does not train all that the assistant says"
_HEADERS = "the {% generation %} tags of the chat template enclose the headers of turns; these are not trained"


class Unmarkable(Exception):
    """It cannot be told which tokens are the assistant's; the message says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation, the text that the template makes of it, the stretches that its tags mark (None where they do not count),
    and where words stand.
    """

    template: Template
    messages: Messages
    tools: Any
    text: str
    marked: list[Stretch] | None
    words: list[Words]
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, template: Template, said: Messages, tools: Any, *, tagged: bool) -> "Rendered":
        """Render the conversation `said`.

        Raises:
            TemplateRefusal: the template does not render it.
        """
        messages = template.given(said)
        text, marked = template.render_tagged(messages, tools) if tagged else (template.render(messages, tools), None)
        words = find_words(messages, text, lambda changed: template.try_render(changed, tools))
        unread = unread_fields(messages, template.texts)
        remarks = [f"messages have {', '.join(map(repr, unread))}, which the chat template does not read"] if unread else []
        return cls(template, messages, tools, text, marked, words, remarks)

    def turns(self, trained: list[int]) -> Iterator[Stretch]:
        """Yield where the assistant speaks, in the messages `trained`: words and end of each turn, without its header. Where
        tags count, it is what they mark of these messages; what they mark less than is said is a remark.

        Raises:
            Unmarkable: it cannot be told where; or tags mark more than these turns.
        """
        if self.marked is not None:
            yield from self._tagged(trained, self.marked)
            return
        if self.template.answer_end is not None and not self.template.answer_end.strip():
            self.remarks.append(_HAS_NO_END)
        for index in trained:
            own, low, high = self._own(index)
            closed = (
                self.text
                if index == len(self.messages) - 1
                else self.template.try_render(self.messages[: index + 1], self.tools)
            )
            if closed is not None and not own and self.text.startswith(closed):
                high = min(high, len(closed))
            begin = self._begin(index, own, low, high)
            end = self._end(index, begin, own, high, closed)
            yield self._checked(index, begin, end)

    def _tagged(self, trained: list[int], marked: list[Stretch]) -> Iterator[Stretch]:
        spoken = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if self.template.tags_leave_end_out:
            self.remarks.append(_NO_END)
        if any(not any(begin <= w.place < end for begin, end in marked) for w in self.words if w.message in trained):
            self.remarks.append(_SAYS_LESS)
        for number, (start, end) in enumerate(marked):
            inside = [words for words in self.words if start <= words.place < end]
            stop = min([end, *(words.begin for words in inside)])
            begin, header = start, self.template.header
            if header and self._has_header(start, stop):
                begin = self.text.rfind(header, start, stop) + len(header)
                self.remarks.extend([] if _HEADERS in self.remarks else [_HEADERS])
            in_order = spoken[number] if len(spoken) == len(marked) else None
            owner = next((words.message for words in inside if words.message in spoken), in_order)
            if owner is None and (inside or len(trained) < len(spoken)):
                raise Unmarkable("by the tags of the chat template, it cannot be told which turn a stretch belongs to")
            if owner is None:
                yield begin, end
            elif owner in trained:
                yield self._checked(owner, begin, end, whole=False)

    def _own(self, index: int) -> tuple[list[Words], int, int]:
        """Return the words of a message, and between which characters it must lie: after others' words and before others'."""
        own = [words for words in self.words if words.message == index]
        if own:
            low = max((words.end for words in self.words if words.message != index and words.place < own[0].place), default=0)
            after = (words.begin for words in self.words if words.message != index and words.place > own[-1].place)
            return own, low, min(after, default=len(self.text))
        low = max((words.end for words in self.words if words.message < index), default=0)
        after = (words.begin for words in self.words if words.message > index and words.place >= low)
        return own, low, min(after, default=len(self.text))

    def _begin(self, index: int, own: list[Words], low: int, high: int) -> int:
        """Return where turn `index` begins: behind all that the template puts before it."""
        before, header = self.messages[:index], self.template.header
        for opened in (True, False):
            start = self.template.try_render(before, self.tools, prompt=opened)
            if start is not None and not opened:
                start = None if header is None else start + header
            elif header is None and start == self.template.try_render(before, self.tools):
                continue  # there may be a header behind it
            if start is not None and self.text.startswith(start) and self._is_open(len(start), own, is_first=not before):
                return len(start)
        # No beginning of the conversation is rendered as in the whole: it is looked for by what opens a turn.
        stop = own[0].begin if own else high
        begin = -1
        if header and (own or self.text.count(header, low, stop) == 1):
            begin = self.text.rfind(header, low, stop) + len(header)
        elif header == "":
            begin = low + self._led(index, low)
        if not low <= begin - len(header or "") <= stop:
            raise Unmarkable(
                f"the chat template renders the messages before message {index} otherwise than in the whole conversation"
            )
        return begin

    def _led(self, index: int, low: int) -> int:
        """Return how many characters stand between the words before `low` and turn `index`, or less than -`low`."""
        start = self.template.try_render(self.messages[:index], self.tools, prompt=True) or ""
        last = next(
            (self.text[words.begin : words.end] for words in self.words if words.end == low and words.message < index), ""
        )
        tail = start.rpartition(last)[2] if last and last in start else None
        return len(tail) if tail is not None and self.text.startswith(tail, low) else -low - 1

    def _is_open(self, begin: int, own: list[Words], *, is_first: bool) -> bool:
        """Return whether no header stands between `begin` and the words of the turn."""
        header = self.template.header or ""
        if not own:
            return not (header and self.text.startswith(header, begin)) and not (is_first and begin == 0)
        if own[0].begin < begin or self._has_header(begin, own[0].begin):
            return False
        # Without a header before the first turn of all, a system message of the template could stand there.
        return bool(header or not is_first or not self.text[begin : own[0].begin].strip())

    def _end(self, index: int, begin: int, own: list[Words], high: int, closed: str | None) -> int:
        """Return where the turn that begins at `begin` ends, behind its words and before character `high`.

        Some templates render the last turn differently from earlier ones; Qwen3 adds an empty thought to it. So the whole does
        not begin with `closed`, the conversation that ends with this turn. Then the last special token of `closed` marks the
        end in both, or the text behind its words does. Otherwise the next special token ends the turn.
        """
        after = max([begin, *(words.end for words in own)])
        if closed is not None and self.text.startswith(closed) and len(closed) >= after:
            return len(closed)
        tail = self.template.answer_end or "" if closed is None else closed[begin:]
        specials = self.template.marks
        for marks in (self.template.tokenizer.all_special_tokens, specials):
            place, mark = max(((tail.rfind(each), each) for each in marks if each), default=(-1, ""))
            found = self.text.find(mark, after, high) if place >= 0 else -1
            if found >= 0 and tail[:place].endswith(self.text[after:found]):  # else it is the mark of another turn
                return found + len(mark)
        if own and closed is not None:
            _, last, tail = closed.rpartition(self.text[own[-1].begin : own[-1].end] or " ")
            if last.strip() and self.text.startswith(tail, after):
                return after + len(tail)
        nexts = [(place, each) for each in specials if (place := self.text.find(each, after, high)) >= 0]
        ends_so = (self.template.answer_end or "").strip().startswith(tuple(specials))
        if not nexts or not own or not ends_so or self.messages[index].get("tool_calls"):
            raise Unmarkable(
                f"the chat template renders message {index} otherwise than in the whole conversation, and no mark ends it"
            )
        found, mark = min(nexts)
        return found + len(mark)

    def _checked(self, index: int, begin: int, end: int, *, whole: bool = True) -> Stretch:
        """Return the stretch of turn `index`, if only its own words are there; `whole`: all of them."""
        for words in self.words:
            is_inside = begin <= words.place < end
            if words.message != index and is_inside:
                raise Unmarkable(f"by the chat template, words of message {words.message} stand in the turn of message {index}")
            if whole and words.message == index and not begin <= words.begin <= words.end <= end:
                raise Unmarkable(f"the chat template prints words of message {index} outside its turn")
        own = [words for words in self.words if words.message == index and begin <= words.place < end]
        if self._has_header(begin, min((words.begin for words in own), default=begin)) or self._has_header(
            max((words.end for words in own), default=begin), end
        ):
            raise Unmarkable(f"the chat template prints a header in the turn of message {index}")
        return begin, end

    def _has_header(self, begin: int, end: int) -> bool:
        """Return whether a turn of the assistant begins between two characters."""
        return bool(self.template.header) and str(self.template.header) in self.text[begin:end]
