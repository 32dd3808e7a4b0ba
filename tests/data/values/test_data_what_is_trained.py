"""The data says what may be trained, the template only how it looks. Run: pytest tests/data/values/test_data_what_is_trained.py

The reference knows nothing of templates but the words and headers: each message has words of its own (`conversations.py`), so
whose words are trained can be read off the trained text.
"""

import copy
import json
import re
from itertools import groupby
from pathlib import Path

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from conversations import CONVERSATIONS, TOOL, call, row_of, said, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from headrace.data.tokens.encode import encode_rows
from headrace.data.values.values import Encoded, Kind, Row, Unmarked
from headrace.terms.errors import DataError

# What may never be trained: headers of whomever, BOS, and system messages that templates bring along.
HEADERS = re.compile(
    r"<\|im_start\|>|start_header_id|start_of_turn|(?<!<\|end\|>)<\|start\|>|\[/?INST\]|<｜(User|Assistant)｜>|<\|(user|system|"
    r"assistant|observation)\|>|HelperBot|USER:|ASSISTANT|<\|bos\|>|TOOL_RESULTS|AVAILABLE_TOOLS|outputs?▁|tool_response"
)
WORDS = re.compile(r"w(\d+)([a-z])")


def encoded(template, row, kind=Kind.CHAT):
    (made,) = encode_rows(kind, [Row("file, line 1", row)], tokenizer_of(TEMPLATES[template]), 10_000)
    return made


def runs(trained):
    """The maximal runs of trained tokens, as pairs of begin and end."""
    found, at = [], 0
    for is_trained, group in groupby(trained):
        length = len(list(group))
        found += [(at, at + length)] if is_trained else []
        at += length
    return found


def texts_of(template, made):
    decode = tokenizer_of(TEMPLATES[template]).decode
    return [decode(made.ids[begin:end]) for begin, end in runs(made.trained)]


def faults(template, messages, ids, trained_runs, *, untrained=frozenset()):
    """What is wrong with the trained runs of tokens of a conversation, by the words of its messages."""
    decode = tokenizer_of(TEMPLATES[template]).decode
    pieces = [decode(ids[begin:end]) for begin, end in trained_runs]
    heard = [message for index, message in enumerate(messages) if message["role"] == "assistant" and index not in untrained]
    spoken = {int(number) for number, _ in WORDS.findall(json.dumps(heard))}
    # The data's own words may look like headers.
    own = [text for message in heard for text in _texts(message)]
    found = []
    for piece in pieces:
        others = {int(number) for number, _ in WORDS.findall(piece)} - spoken
        found += [f"words of message {number} are trained" for number in others]
        bare = piece
        for text in own:
            bare = bare.replace(text.strip(), "")
        found += [f"{mark[0]!r} is trained" for mark in HEADERS.finditer(bare)]
        found += ["a list of parts is trained"] if re.search(r"['\"]text['\"]:", bare) else []
        found += ["arguments are escaped twice"] if '\\"city' in bare else []
    whole, inside = decode(ids), "".join(pieces)
    shown = {word for word in WORDS.findall(whole) if int(word[0]) in spoken}
    return found + [f"w{''.join(word)} is shown and not trained" for word in shown - set(WORDS.findall(inside))]


def _texts(value):
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in _texts(each) if len(text.strip()) > 9]


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_turn_is_trained_by_its_own_words_and_nothing_else(template):
    wrong, left_out = {}, set()
    for name, messages in CONVERSATIONS.items():
        made = encoded(template, row_of(name))
        if isinstance(made, Unmarked):
            left_out.add(name)
        elif problems := faults(template, messages, made.ids, runs(made.trained)):
            wrong[name] = problems
    assert wrong == {}
    assert left_out <= EXPECTED_LEFT_OUT.get(template, set())


_FIRST = {name for name in CONVERSATIONS if "first" in name}
_ROWS = {name for name in CONVERSATIONS if name.startswith("row")}
_TOOLS = {name for name in CONVERSATIONS if name.startswith(("call", "parallel"))}
EXPECTED_LEFT_OUT = {
    "chatml": {"call-null"},
    "llama3": {"parallel"},
    "gemma": _FIRST | _ROWS | _TOOLS,  # refused
    "mistral": _FIRST | _ROWS,  # refused
    "qwen3.5": {"first-alone"},  # refused: no question
    "deepseek-r1": {"call-null"},
    "phi3": _TOOLS | {"empty", "empty-first", "blank"},
    "vicuna": {"call-null"},
    "parts": {"call-null"},
    "merging": _ROWS,  # which of the words are whose is known, but not where one turn ends
    "gpt-oss": {"empty", "empty-first", "blank"},  # nothing said, and another mark at the end than if it were the last turn
}


def test_what_was_trained_right_keeps_its_tokens():
    """`masks_before.json` was made with the rules of format 3: tokens of the sample, then begin and end of each run."""
    before = json.loads((Path(__file__).parents[1] / "masks_before.json").read_text())
    kept, wrong_before = 0, 0
    for template, masks in before.items():
        for name, (length, *borders) in masks.items():
            made = encoded(template, row_of(name))
            # Contents and arguments may be given otherwise now, and the text is another: then they were wrong before.
            old = list(zip(borders[::2], borders[1::2], strict=True))
            if isinstance(made, Encoded) and len(made.ids) == length and runs(made.trained) == old:
                kept += 1
                continue
            problems = name in ("parts", "call-text") or faults(template, CONVERSATIONS[name], _ids(template, name), old)
            assert problems or _is_cut(template, name, old), f"{template}, {name}: was right, and is another now"
            wrong_before += 1
    assert kept > 220
    assert wrong_before > 60


def _ids(template, name):
    row = row_of(name)
    tokenizer = tokenizer_of(TEMPLATES[template])
    messages = [{key: value for key, value in message.items() if value is not None} for message in row["messages"]]
    text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _is_cut(template, name, old):
    """Whether a turn ended before the assistant's own words that look like marks did."""
    decode = tokenizer_of(TEMPLATES[template]).decode
    said_last = [(message["content"] or "").strip() for message in CONVERSATIONS[name] if message["role"] == "assistant"]
    trained = [decode(_ids(template, name)[begin:end]) for begin, end in old]
    return any(words not in "".join(trained) for words in said_last)


LETTERS = st.text("ab <|>\n</think>", max_size=6)
ROLE_MARKS = [
    "<|im_start|>assistant\n",
    "<start_of_turn>model\n",
    "<｜Assistant｜>",
    "<|start|>assistant",
    "<|user|>",
    "[/INST]",
]
MARKED = st.sampled_from(["<|im_end|>", "<|end|>", "<|eot_id|>", "</think>", *ROLE_MARKS])


@st.composite
def talks(draw):
    """Conversations of any order of roles, with odd contents around words of their own, calls, reasoning and flags."""
    roles = draw(st.text("ua", min_size=1, max_size=6).filter(lambda each: "a" in each))
    roles = draw(st.sampled_from(["", "s"])) + roles
    messages, untrained = turns(roles), set()
    for index, message in enumerate(messages):
        before, middle, after = draw(LETTERS), draw(st.one_of(st.just(" "), MARKED, LETTERS)), draw(LETTERS)
        words = draw(st.sampled_from(["{0}w{1}a{2}w{1}b{3}", "w{1}a w{1}b", "w{1}a", "", " \n"]))
        message["content"] = words.format(before, index, middle, after)
        if draw(st.booleans()) and message["content"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if message["role"] != "assistant":
            continue
        if draw(st.integers(0, 4)) == 0:
            message["tool_calls"] = [call(index, text=draw(st.booleans()))]
        if draw(st.integers(0, 4)) == 0:
            message["reasoning_content"] = f"w{index}r"
        flag = draw(st.sampled_from([{}, {}, {}, {"weight": 0}, {"train": True}, {"loss": False}, {"training": 1.0}]))
        message.update(flag)
        if flag and not next(iter(flag.values())):
            untrained.add(index)
    return messages, frozenset(untrained)


@pytest.mark.parametrize("template", TEMPLATES)
@given(talk=talks())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_whatever_is_said_nothing_but_the_assistants_turns_is_trained(template, talk):
    messages, untrained = talk
    made = encoded(template, {"messages": messages, "tools": [TOOL]})
    if isinstance(made, Unmarked):
        return
    spoken = {index for index, message in enumerate(messages) if message["role"] == "assistant"} - untrained
    inside = "".join(texts_of(template, made))
    assert {int(number) for number, _ in WORDS.findall(inside)} <= spoken
    shown = {word for word in WORDS.findall(tokenizer_of(TEMPLATES[template]).decode(made.ids)) if int(word[0]) in spoken}
    assert shown == set(WORDS.findall(inside))
    if not any(mark in json.dumps(messages, ensure_ascii=False) for mark in ("<|", "<start", "[/", "<｜", "<tool")):
        assert faults(template, messages, made.ids, runs(made.trained), untrained=untrained) == []


@pytest.mark.parametrize("template", ["chatml", "qwen3", "smollm3", "tagged", "gpt-oss"])
@pytest.mark.parametrize("flag", ["weight", "loss", "train", "training"])
def test_turns_that_the_data_flags_as_context_are_not_trained(template, flag):
    messages = turns("uauaua")
    messages[1][flag], messages[3][flag], messages[5][flag] = 0, True, 1.0
    made = encoded(template, {"messages": messages})
    assert {number for number, _ in WORDS.findall("".join(texts_of(template, made)))} == {"3", "5"}
    assert flag not in tokenizer_of(TEMPLATES[template]).decode(made.ids)
    assert made.ids == encoded(template, {"messages": turns("uauaua")}).ids


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"weight": 0.5}, r"messages\[1\] has weight 0.5; expected 0, 1, false or true"),
        ({"train": "false"}, r"messages\[1\] has train 'false'"),
        ({"loss": [0]}, r"messages\[1\] has loss \[0\]"),
        ({"weight": 1, "train": False}, r"messages\[1\] has weight 1 and train False, which differ"),
        ({"train_detail": [{"begin_offset": 0}]}, r"messages\[1\] has train_detail, which trains parts of a turn"),
    ],
)
def test_flags_that_are_neither_on_nor_off_are_refused_by_name(fields, found):
    messages = turns("ua")
    messages[1].update(fields)
    with pytest.raises(DataError, match=found):
        encoded("chatml", {"messages": messages})


def test_flags_and_fields_that_nobody_reads_are_named():
    messages = turns("ua")
    messages[0]["train"], messages[1]["mask"] = True, 1
    made = encoded("chatml", {"messages": messages})
    assert [words for _, words in made.remarks] == [
        "messages have 'mask', which the chat template does not read",
        "a flag asks to train a message of role 'user'; only turns of the assistant are trained",
    ]
    assert encoded("chatml", {"messages": turns("ua")}).remarks == ()
    # transformers hands reasoning on under all its names
    messages = turns("ua")
    messages[1]["reasoning"] = "w1r"
    assert encoded("qwen3", {"messages": messages}).remarks == ()


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video", "audio", "file", None])
@pytest.mark.parametrize("template", ["gemma", "llama3"])
def test_pictures_sounds_and_videos_are_refused_by_name(template, kind):
    part = {"type": kind, "image": "x.png"} if kind else {"image": "x.png"}
    messages = [said("user", [part, {"type": "text", "text": "what?"}]), said("assistant", "a cat")]
    with pytest.raises(DataError, match=rf"messages\[0\] has a part .*{kind or 'image'}.*only text is read"):
        encoded(template, {"messages": messages})
    with pytest.raises(DataError, match="line 1: 'images' is not empty"):
        encoded(template, {"messages": turns("ua"), "images": ["x.png"]})
    with pytest.raises(DataError, match=r"messages\[0\]: 'images' is not empty"):
        encoded(template, {"messages": [said("user", "what?", images=["x.png"]), said("assistant", "a cat")]})
    assert isinstance(encoded(template, {"messages": turns("ua"), "images": []}), Encoded)


@pytest.mark.parametrize("template", TEMPLATES)
def test_parts_of_text_are_read_as_one_text(template):
    for parts in (["w0a ", {"text": "w0b"}], [{"type": "input_text", "text": "w0a w0b"}]):
        if template == "gemma" and len(parts) == 2:
            continue  # takes lists, and trims each part
        made = encoded(template, {"messages": [said("user", parts), said("assistant", "w1a w1b")]})
        assert made.ids == encoded(template, {"messages": turns("ua")}).ids


ARGUMENTS = [("one", '{"city": "w1c"}'), ("empty", "{}"), ("no object", "w1c"), ("list", "[1]"), ("broken", '{"city": ')]


@pytest.mark.parametrize("template", ["llama3", "mistral", "qwen3", "qwen3.5", "glm", "gpt-oss", "deepseek"])
def test_arguments_are_given_in_the_form_that_the_template_prints_as_they_are(template):
    def made(arguments):
        calls = [{"id": "call00010", "type": "function", "function": {"name": "find1", "arguments": arguments}}]
        return encoded(
            template, {"messages": [*turns("u"), said("assistant", "", tool_calls=calls), *turns("uat")[2:]], "tools": [TOOL]}
        )

    plain = made({"city": "w1c"})
    assert made('{"city": "w1c"}') == plain
    assert any("w1c" in text and "\\" not in text for text in texts_of(template, plain))
    for name, text in ARGUMENTS[1:]:
        found = made(text)
        assert isinstance(found, Unmarked) or "'city'" not in "".join(texts_of(template, found)), name


BARE_TAGS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    "{% endgeneration %}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


def test_tags_that_mark_less_or_more_than_is_said_are_named():
    def remarks(template, messages):
        (made,) = encode_rows(Kind.CHAT, [Row("1", {"messages": messages})], tokenizer_of(template), 1000)
        return [words for _, words in made.remarks]

    (end,) = remarks(BARE_TAGS, turns("ua"))
    assert "trains no mark that ends a turn" in end
    calling = [*turns("u"), said("assistant", "w1a", tool_calls=[call(1)])]
    assert any("does not train all that the assistant says" in each for each in remarks(BARE_TAGS, calling))
    assert remarks(TEMPLATES["tagged"], turns("uaua")) == []
    (header,) = remarks(TEMPLATES["smollm3"], turns("ua"))
    assert "enclose the headers of turns; these are not trained" in header


def test_tags_around_a_whole_conversation_leave_the_sample_out():
    template = "{% generation %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}{% endgeneration %}"
    (made,) = encode_rows(Kind.CHAT, [Row("1", {"messages": turns("ua")})], tokenizer_of(template), 1000)
    assert isinstance(made, Unmarked)
    assert "words of message 0 stand in the turn of message 1" in made.reason


@pytest.mark.parametrize("template", ["gpt-oss", "phi3", "qwen3", "llama3", "deepseek"])
def test_marks_that_have_no_role_of_their_own_end_turns_too(template):
    """As `<|end|>` of gpt-oss, whose tokenizer names `<|return|>` alone."""
    tokenizer = tokenizer_of(TEMPLATES[template], named=False)
    assert "<|end|>" not in tokenizer.all_special_tokens
    for name in ("two", "three", "system", "row", "call", "call-more", "reasoning", "marks"):
        (made,) = encode_rows(Kind.CHAT, [Row("1", row_of(name))], tokenizer, 10_000)
        expected = encoded(template, row_of(name))
        assert isinstance(made, Unmarked) == isinstance(expected, Unmarked)
        if isinstance(made, Encoded):
            assert [tokenizer.decode(made.ids[a:b]) for a, b in runs(made.trained)] == texts_of(template, expected), name


def test_a_turn_of_which_nothing_is_trained_does_not_lend_its_end_to_another():
    """The last turn of gpt-oss ends otherwise than earlier ones: its mark must not be taken for that of a turn before."""
    messages = [*turns("ua"), said("user", ""), said("assistant", "", weight=0)]
    made = encoded("gpt-oss", {"messages": messages})
    assert texts_of("gpt-oss", made) == ["<|channel|>final<|message|>w1a w1b<|end|>"]


def test_of_a_completion_of_messages_the_assistants_turns_are_trained():
    messages = turns("suauaua")
    made = encoded("chatml", {"prompt": messages[:4], "completion": messages[4:]}, Kind.COMPLETION)
    assert texts_of("chatml", made) == ["w4a w4b<|im_end|>\n", "w6a w6b<|im_end|>\n"]
    messages[4]["weight"] = 0
    made = encoded("chatml", {"prompt": messages[:4], "completion": messages[4:]}, Kind.COMPLETION)
    assert texts_of("chatml", made) == ["w6a w6b<|im_end|>\n"]
    with pytest.raises(DataError, match=r"no message has the role 'assistant' .found user"):
        encoded("chatml", {"prompt": turns("a"), "completion": turns("u")}, Kind.COMPLETION)


def test_a_beginning_that_the_template_refuses_does_not_matter():
    """Only we render beginnings: a template may insist on a question in what is the whole for it."""
    strict = "{% if messages[-1].role == 'user' %}{{ raise_exception('no answer') }}{% endif %}" + TEMPLATES["chatml"]
    (made,) = encode_rows(Kind.CHAT, [Row("1", {"messages": turns("uaua")})], tokenizer_of(strict), 1000)
    assert isinstance(made, Unmarked | Encoded)


@pytest.mark.parametrize(
    ("kind", "row"),
    [(Kind.TEXT, {"text": "<|bos|>the fox"}), (Kind.COMPLETION, {"prompt": "<|bos|>the", "completion": " fox"})],
)
def test_a_text_that_brings_its_own_bos_keeps_both_as_in_transformers_and_is_named(kind, row):
    tokenizer = copy.deepcopy(tokenizer_of(TEMPLATES["plain"]))
    bos = ("<|bos|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    (made,) = encode_rows(kind, [Row("1", row)], tokenizer, 1000)
    ids = tokenizer("".join(row.values()))["input_ids"]
    assert ids[:2] == [tokenizer.bos_token_id] * 2, "the case this test is about"
    assert made.ids == [*ids, tokenizer.eos_token_id]
    ((place, words),) = made.remarks
    assert (place, words) == (
        "1",
        "the text begins with <|bos|>, and the tokenizer puts another before it; take it out of the text",
    )
    without = {name: text.removeprefix("<|bos|>") for name, text in row.items()}
    (made,) = encode_rows(kind, [Row("1", without)], tokenizer, 1000)
    assert made.remarks == ()
