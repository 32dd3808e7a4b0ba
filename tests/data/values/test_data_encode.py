"""Rows to tokens and masks. Run: pytest tests/data/values/test_data_encode.py"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import COUNTING, PLAIN, STRICT, TAGGED, THINKING, make_tokenizer, merging_tokenizer, slow_tokenizer

from headrace.data.tokens.encode import encode_rows
from headrace.data.values.values import Kind, Row, Unmarked
from headrace.terms.errors import DataError, ModelError

EOS = "<|eos|>"
PLAIN_TOKENIZER = make_tokenizer(PLAIN)


def encode(kind, values, tokenizer, most_tokens=1000):
    made = next(encode_rows(kind, [Row("file, line 1", values)], tokenizer, most_tokens))
    assert len(made.ids) == len(made.trained)
    return made.ids, made.trained


def trained_texts(ids, trained, tokenizer):
    """The maximal runs of trained tokens, decoded."""
    runs, run = [], []
    for token, target in [*zip(ids, trained, strict=True), (0, False)]:
        if target:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def chat(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]


def test_text_is_trained_whole_and_ends_with_eos_once():
    tokenizer = make_tokenizer()
    for text in ("the fox", "the fox" + EOS):
        ids, trained = encode(Kind.TEXT, {"text": text}, tokenizer)
        assert tokenizer.decode(ids) == "the fox" + EOS
        assert all(trained)
        assert len(trained) == len(ids)


@given(prompt=st.text(max_size=20), completion=st.text(max_size=20))
@settings(max_examples=30, deadline=None)
def test_of_a_prompt_with_completion_exactly_the_completion_and_eos_are_trained(prompt, completion):
    tokenizer = PLAIN_TOKENIZER
    ids, trained = encode(Kind.COMPLETION, {"prompt": prompt, "completion": completion}, tokenizer)
    prompt_ids = tokenizer(prompt)["input_ids"]
    assert ids[: len(prompt_ids)] == prompt_ids
    assert trained == [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == prompt + completion + EOS


def test_a_token_over_the_border_of_prompt_and_completion_is_split_there():
    tokenizer = make_tokenizer()
    together = tokenizer("headrace")["input_ids"]
    ids, trained = encode(Kind.COMPLETION, {"prompt": "headr", "completion": "ace"}, tokenizer)
    assert together[: len(tokenizer("headr")["input_ids"])] != tokenizer("headr")["input_ids"], "the case this test is about"
    assert trained_texts(ids, trained, tokenizer) == ["ace" + EOS]


def test_prompt_and_completion_may_be_messages_and_may_mix_with_strings():
    rows = [
        Row("1", {"prompt": "the", "completion": " fox"}),
        Row("2", {"prompt": chat("hi"), "completion": chat("", "water")[1:]}),
        Row("3", {"prompt": "lazy", "completion": " dog"}),
    ]
    encoded = list(encode_rows(Kind.COMPLETION, rows, PLAIN_TOKENIZER, 1000))
    texts = [trained_texts(made.ids, made.trained, PLAIN_TOKENIZER) for made in encoded]
    assert texts == [[" fox" + EOS], ["water<|end|>\n"], [" dog" + EOS]]


@pytest.mark.parametrize(
    ("template", "ending"),
    [(TAGGED, ["<|end|>", "<|end|>"]), (PLAIN, ["<|end|>\n", "<|end|>\n"]), (THINKING, ["<|end|>", "<|end|>\n"])],
)
def test_only_the_assistants_turns_are_trained(template, ending):
    tokenizer = make_tokenizer(template)
    ids, trained = encode(Kind.CHAT, {"messages": chat("two?", "four", "why?", "two and two")}, tokenizer)
    thought = "<think>\n\n</think>\n\n" if template is THINKING else ""
    assert trained_texts(ids, trained, tokenizer) == ["four" + ending[0], thought + "two and two" + ending[1]]
    assert tokenizer.decode(ids).startswith("<|start|>user\ntwo?<|end|>\n<|start|>assistant\nfour<|end|>")


@given(turns=st.lists(st.text(alphabet="the foxü\n", min_size=1, max_size=8), min_size=2, max_size=6))
@settings(max_examples=30, deadline=None)
def test_turns_found_by_rendering_are_those_that_tags_mark(turns):
    tagged, plain = make_tokenizer(TAGGED), PLAIN_TOKENIZER
    ids, by_tags = encode(Kind.CHAT, {"messages": chat(*turns)}, tagged)
    same_ids, by_rendering = encode(Kind.CHAT, {"messages": chat(*turns)}, plain)
    assert ids == same_ids
    newline = plain("\n")["input_ids"]
    # The rendering also has the newline that follows the end mark; the tags of this template leave it out.
    extra = [index for index, (a, b) in enumerate(zip(by_tags, by_rendering, strict=True)) if a != b]
    assert all(by_rendering[index] and [ids[index]] == newline and by_tags[index - 1] for index in extra)


def test_an_assistant_may_speak_first_and_twice():
    tokenizer = make_tokenizer(PLAIN)
    messages = [{"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    ids, trained = encode(Kind.CHAT, {"messages": messages}, tokenizer)
    assert trained_texts(ids, trained, tokenizer)[-1].endswith("ho<|end|>\n")


def test_null_fields_of_messages_do_not_reach_the_template():
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}{% generation %}x{% endgeneration %}"
    )
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}]
    ids, _ = encode(Kind.CHAT, {"messages": messages}, tokenizer)
    assert tokenizer.decode(ids) == "role,content;role,content;x"


def test_tools_reach_the_template():
    tokenizer = make_tokenizer("{{ tools | length }} tools {% generation %}{{ messages[1].content }}{% endgeneration %}")
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    ids, trained = encode(Kind.CHAT, {"messages": chat("a", "b"), "tools": [tool, tool]}, tokenizer)
    assert tokenizer.decode(ids) == "2 tools b"
    assert any(trained)


def test_labels_decide_what_of_ready_tokens_is_trained():
    tokenizer = make_tokenizer()
    assert encode(Kind.TOKENS, {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, tokenizer) == (
        [5, 6, 7],
        [False, True, False],
    )
    assert encode(Kind.TOKENS, {"input_ids": [5, 6], "labels": None}, tokenizer) == ([5, 6], [True, True])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_ready_tokens_is_left_out(side):
    ids, mask, labels = [0, 0, 5, 6, 7], [0, 0, 1, 1, 1], [-100, -100, -100, 6, 7]
    if side == "right":
        ids, mask, labels = [5, 6, 7, 0, 0], [1, 1, 1, 0, 0], [-100, 6, 7, -100, -100]
    row = {"input_ids": ids, "attention_mask": mask}
    assert encode(Kind.TOKENS, row, PLAIN_TOKENIZER) == ([5, 6, 7], [True, True, True])
    assert encode(Kind.TOKENS, row | {"labels": labels}, PLAIN_TOKENIZER) == ([5, 6, 7], [False, True, True])
    one = {"input_ids": [5, 6, 7], "position_ids": [0, 1, 2], "seq_lengths": [3], "attention_mask": None}
    assert encode(Kind.TOKENS, one, PLAIN_TOKENIZER) == ([5, 6, 7], [True, True, True])


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        (Kind.TEXT, {"text": 5}, "text must be a string, found int '5'"),
        (Kind.TEXT, {"text": ["a"]}, "text must be a string, found list"),
        (Kind.TEXT, {"text": "a\ud800"}, "half a character"),
        (Kind.COMPLETION, {"prompt": "a", "completion": chat("b")}, "completion must be a string, found list"),
        (Kind.COMPLETION, {"prompt": chat("a"), "completion": []}, "completion must be a non-empty list"),
        (Kind.CHAT, {"messages": "hello"}, "messages must be a non-empty list of messages, found str"),
        (Kind.CHAT, {"messages": ["hello"]}, r"messages\[0\] must be an object"),
        (Kind.CHAT, {"messages": [{"role": "user"}]}, r"messages\[0\] must be an object with a string role and a content"),
        (Kind.CHAT, {"messages": [{"role": 1, "content": "a"}]}, r"messages\[0\]"),
        (Kind.CHAT, {"messages": chat("only me")}, "no message has the role 'assistant' .found user"),
        (Kind.TOKENS, {"input_ids": "abc"}, "input_ids must be a list of integers, found str"),
        (Kind.TOKENS, {"input_ids": [1, True]}, "must be a list of integers"),
        (Kind.TOKENS, {"input_ids": [1, -1]}, "input_ids holds -1"),
        (Kind.TOKENS, {"input_ids": [1, 2**31]}, "input_ids holds 2147483648"),
        (Kind.TOKENS, {"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
        (Kind.TOKENS, {"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask must hold 2 times 0 or 1"),
        (Kind.TOKENS, {"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask must hold 2 times 0 or 1"),
        (
            Kind.TOKENS,
            {"input_ids": [1, 2], "completion_mask": [0, 1]},
            "completion_mask is not read beside input_ids; give labels",
        ),
        (Kind.TOKENS, {"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, "it holds several samples"),
        (Kind.TOKENS, {"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}, "it holds several samples"),
        (Kind.TOKENS, {"input_ids": [1, 2, 3], "position_ids": 5}, "position_ids must be a list of integers"),
        (Kind.TOKENS, {"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2, input_ids\[0\] is 1"),
    ],
)
def test_a_bad_sample_is_named_with_what_was_found(kind, values, found):
    with pytest.raises(DataError, match="file, line 1: .*" + found):
        encode(kind, values, PLAIN_TOKENIZER)


def test_a_sample_whose_turns_cannot_be_found_is_not_guessed_at():
    tokenizer = make_tokenizer(COUNTING)
    for kind, values in (
        (Kind.CHAT, {"messages": chat("a", "b")}),
        (Kind.COMPLETION, {"prompt": chat("a"), "completion": chat("a", "b")[1:]}),
    ):
        (made,) = encode_rows(kind, [Row("file, line 1", values)], tokenizer, 1000)
        assert made == Unmarked(
            "file, line 1", "the chat template renders the messages before message 1 otherwise than in the whole conversation"
        )


@pytest.mark.parametrize("template", [PLAIN, TAGGED, THINKING])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_token_over_the_border_of_a_turn_is_the_assistants(template, trim_offsets):
    """The ids are those of the whole conversation; a line break of the template may be in one token with the assistant's."""
    tokenizer = merging_tokenizer(template, trim_offsets=trim_offsets)
    assert "ĊĊ" in tokenizer.tokenize("assistant\n\n\nfour"), "the case this test is about"
    thought = "<think>\n\n</think>\n\n" if template is THINKING else ""
    for spaced in ("\nfour", "\n\n  four\n", " four", "\nfour ", "  "):
        messages = chat("two?", spaced, "why?", spaced)
        ids, trained = encode(Kind.CHAT, {"messages": messages}, tokenizer)
        assert ids == tokenizer.apply_chat_template(messages)["input_ids"]
        first, last = trained_texts(ids, trained, tokenizer)
        ends = ("<|end|>\n", "<|end|>\n") if template is PLAIN else ("<|end|>", "<|end|>\n" if thought else "<|end|>")
        assert first in (spaced + ends[0], "\n" + spaced + ends[0])
        assert last in (thought + spaced + ends[1], "\n" + thought + spaced + ends[1])


def test_a_tokenizer_without_offsets_marks_what_one_with_them_does():
    for template in (PLAIN, TAGGED, THINKING):
        fast, slow = make_tokenizer(template), slow_tokenizer(template)
        values = {"messages": chat("two?", "four", "why?", "two and two")}
        assert encode(Kind.CHAT, values, slow) == encode(Kind.CHAT, values, fast)


def test_a_tokenizer_without_offsets_leaves_out_what_it_cannot_split():
    tokenizer = slow_tokenizer(PLAIN, merging_tokenizer)
    (made,) = encode_rows(Kind.CHAT, [Row("file, line 1", {"messages": chat("two?", "\n\nfour")})], tokenizer, 1000)
    assert isinstance(made, Unmarked)
    assert "a token crosses the border of a turn" in made.reason


def test_what_the_template_refuses_is_left_out_with_its_place_and_roles():
    messages = [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]
    (made,) = encode_rows(Kind.CHAT, [Row("file, line 1", {"messages": messages})], make_tokenizer(STRICT), 1000)
    assert made == Unmarked(
        "file, line 1", "the chat template refuses this conversation (no tools); its roles are tool, assistant"
    )


def test_a_tokenizer_without_template_or_eos_is_refused_where_the_data_needs_one():
    with pytest.raises(ModelError, match="no chat template"):
        encode(Kind.CHAT, {"messages": chat("a", "b")}, make_tokenizer())
    for kind, values in ((Kind.TEXT, {"text": "a"}), (Kind.COMPLETION, {"prompt": "a", "completion": "b"})):
        with pytest.raises(ModelError, match="no eos_token"):
            encode(kind, values, make_tokenizer(eos=False))
    assert encode(Kind.TOKENS, {"input_ids": [1]}, make_tokenizer(eos=False)) == ([1], [True])


def test_many_rows_come_back_in_order():
    rows = [Row(str(index), {"text": f"fox {index}"}) for index in range(1100)]
    texts = [PLAIN_TOKENIZER.decode(made.ids) for made in encode_rows(Kind.TEXT, rows, PLAIN_TOKENIZER, 1000)]
    assert texts == [f"fox {index}{EOS}" for index in range(1100)]


def marked(kind, values, tokenizer):
    made = next(encode_rows(kind, [Row("file, line 1", values)], tokenizer, 1000, contents=True))
    return made if isinstance(made, Unmarked) else trained_texts(made.ids, made.trained, tokenizer)


@pytest.mark.parametrize("template", [PLAIN, TAGGED, THINKING])
def test_for_calibration_what_anybody_says_is_marked_and_nothing_of_the_template(template):
    tokenizer = make_tokenizer(template)
    whole = tokenizer.apply_chat_template(chat("user fox", "the dog", "assistant user"), tokenize=False)
    assert marked(Kind.CHAT, {"messages": chat("user fox", "the dog", "assistant user")}, tokenizer) == [
        "user fox",
        "the dog",
        "assistant user",
    ]
    ids, _ = encode(Kind.CHAT, {"messages": chat("user fox", "the dog", "assistant user")}, tokenizer)
    assert tokenizer.decode(ids) == whole
    assert marked(Kind.TEXT, {"text": "a fox"}, tokenizer) == ["a fox"]
    assert marked(Kind.COMPLETION, {"prompt": "a fox", "completion": "or two"}, tokenizer) == ["a fox", "or two"]


def test_a_template_that_says_other_texts_for_other_conversations_is_no_way_to_tell_contents():
    said = marked(Kind.CHAT, {"messages": chat("the fox", "headrace-content-")}, make_tokenizer(COUNTING))
    assert [each.strip() for each in said] == ["the fox", "headrace-content-"]  # a token may begin with the template's blank
    counting = make_tokenizer("{% for m in messages %}{{ m.content | length }} {{ m.content }}<|end|>{% endfor %}")
    assert isinstance(marked(Kind.CHAT, {"messages": chat("the fox", "the dog")}, counting), Unmarked)
