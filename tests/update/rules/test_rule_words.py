"""A rule of updates and its settings, as words."""

from typing import Any

import pytest

from headrace.terms.errors import ConfigError
from headrace.terms.options.options import Options
from headrace.update.rules.adamw import AdamW
from headrace.update.rules.sgd import SGD
from headrace.update.rules.table import RULES, optimizer_of


def test_a_rule_and_its_settings_in_words() -> None:
    assert optimizer_of(Options()) == AdamW()
    assert optimizer_of(Options(optimizer="sgd")) == SGD()
    words = Options(optimizer="sgd:momentum=.5, nesterov=true", learning_rate=0.1, weight_decay=0.01)
    assert optimizer_of(words) == SGD(lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01)
    assert optimizer_of(Options.from_record(words.to_record())) == optimizer_of(words)
    words = Options(optimizer="adamw:beta1=0.8,beta2=0.99,eps=1e-7,moments=8bit")
    assert optimizer_of(words) == AdamW(beta1=0.8, beta2=0.99, eps=1e-7, moments="int8")


@pytest.mark.parametrize("rule", [AdamW(), AdamW(beta1=0.0, eps=1e-10, moments="bfloat16"), SGD(momentum=0.99, nesterov=True)])
def test_a_rule_says_the_words_that_mean_it(rule: AdamW | SGD) -> None:
    assert optimizer_of(Options(optimizer=rule.text)) == rule
    assert rule.text.count("=") == sum(getattr(rule, each.key) != each.default for each in rule.settings())


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("adamw8bit:beta2=0.99", "adamw:moments=int8,beta2=0.99"),
        ("adamw8bit", "adamw:moments=int8"),
        ("adamw:eps=1.0", "adamw:eps=1"),
        ("adamw: eps = 1e-6", "adamw:eps=1e-06"),
    ],
)
def test_the_same_rule_is_the_same_text(written: str, text: str) -> None:
    options = Options(optimizer=written)
    assert options == Options(optimizer=text)
    assert options.optimizer == text
    assert Options.of(options.to_json()) == options


@pytest.mark.parametrize("key", ["adam_betas", "adam_epsilon", "moments"])
def test_a_setting_of_a_rule_is_no_option_by_itself(key: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean 'optimizer'"):
        Options.of({key: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "newton"}, "optimizer: 'newton' is not one of adamw, sgd"),
        ({"optimizer": "sgd:beta=1"}, "'beta' is no setting of sgd, which has the settings momentum, nesterov"),
        ({"optimizer": "sgd:momentum=much"}, "optimizer: sgd: momentum: expected a number .*, found 'much'"),
        ({"optimizer": "sgd:momentum=1"}, "momentum: expected a number >= 0 and < 1, found '1'"),
        ({"optimizer": "sgd:nesterov=maybe"}, "nesterov: expected true or false, found 'maybe'"),
        ({"optimizer": "sgd:momentum"}, "in 'sgd:momentum' the setting 'momentum' has no value"),
        ({"optimizer": "sgd:momentum=0,momentum=1"}, "the setting 'momentum' stands twice"),
        ({"optimizer": "sgd:momentum=0,nesterov=true"}, "looks ahead by the momentum, which is 0"),
        ({"optimizer": "adamw:lr=1"}, "'lr' is no setting of adamw, which has the settings beta1, beta2, eps, moments"),
        ({"optimizer": "adamw:moments=int4"}, "moments: expected float32, bfloat16 or int8, found 'int4'"),
        ({"optimizer": "adamw:beta2=1.0"}, "beta2: expected a number >= 0 and < 1, found '1"),
        ({"optimizer": "adamw8bit:moments=bfloat16"}, "the setting 'moments' stands twice"),
    ],
)
def test_what_a_rule_has_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_of(Options(**options))


def test_every_rule_has_a_name_of_its_own_and_no_setting_that_all_have() -> None:
    names = [kind.name for kind in RULES]
    assert len(set(names)) == len(names)
    assert all(kind.name.isidentifier() for kind in RULES)
