"""A rule of updates and its options, as words."""

import pytest

from headrace.terms.errors import ConfigError
from headrace.terms.optimizer import SGD, AdamW
from headrace.terms.options import Options


def test_a_rule_and_its_options_in_words() -> None:
    assert Options().rule == AdamW()
    assert Options(optimizer="sgd").rule == SGD(lr=1e-5)
    words = Options(optimizer="sgd:momentum=0.5,nesterov=true", learning_rate=0.1, weight_decay=0.01)
    assert words.rule == SGD(lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01)
    assert Options.from_record(words.to_record()).rule == words.rule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "muon"}, "optimizer: 'muon' is not one of adamw, sgd"),
        ({"optimizer": "sgd:beta=1"}, "'beta' is no option of sgd, which has the options momentum, nesterov"),
        ({"optimizer": "sgd:momentum=much"}, "momentum: expected a number, found 'much'"),
        ({"optimizer": "sgd:nesterov=1"}, "nesterov: expected true or false, found '1'"),
        ({"optimizer": "sgd:momentum=0,nesterov=true"}, "looks ahead by the momentum, which is 0"),
        ({"optimizer": "adamw:eps=1"}, "'eps' is no option of adamw, which has adam_betas, adam_epsilon and moments"),
        ({"optimizer": "sgd", "moments": "int8"}, "moments: int8 is of AdamW's, and the optimizer is sgd"),
        ({"optimizer": "sgd", "adam_betas": (0.5, 0.5)}, "adam_betas: .* is of AdamW's"),
    ],
)
def test_what_a_rule_has_not_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**options)  # type: ignore[arg-type]
