"""Make `mutants.json` anew: a sample of what cosmic-ray would change. Run, where cosmic-ray is installed: python make_list.py

No mutant is taken of loops in machine code, of annotations, of words of errors, and none that leaves the code as it is.
"""

import ast
import contextlib
import json
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from mutant import Mutant, code_of, functions

ROOT = Path(__file__).parents[2]
MUTANTS = 200
# What is mutated, and how many of each.
SHARES = {
    "headrace/plan/schedules/ledger.py": 14,
    "headrace/flow": 62,
    "headrace/store": 42,
    "headrace/update": 36,
    "headrace/peers/meet": 24,
    "headrace/model/parts/runner.py": 12,
    "headrace/data/chat/turns.py": 10,
}
# Of the update's rules, the files whose private functions are not what is compiled.
_ON_TENSORS = ("clip", "norm", "rule", "tensors", "moment_tensors", "tensor_rule", "table")
_OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Mod_Add|LShift_RShift)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_Gt|Is_IsNot|IsNot_Is|In_NotIn)"
    r"|AddNot|ReplaceAndWithOr|ReplaceOrWithAnd|NumberReplacer|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ZeroIterationForLoop|ReplaceBreakWithContinue|ReplaceContinueWithBreak)"
)


def mutants_of(path: Path, name: str, chance: random.Random) -> Iterator[Mutant]:
    """Yield the mutants of a function that change one line of its code, in an order of chance."""
    source = path.read_text(encoding="utf-8")
    lines, node = source.splitlines(), dict(functions(ast.parse(source)))[name]
    first, module = node.lineno - 1, ".".join(path.relative_to(ROOT).with_suffix("").parts)
    before = compile(source, "file", "exec")
    alone = textwrap.dedent("\n".join(lines[first : node.end_lineno])) + "\n"
    operators = [each for each in operator_names() if _OPERATORS.fullmatch(each)]
    for operator in chance.sample(operators, len(operators)):
        for occurrence in range(100):
            changed = mutate_code(alone.encode(), get_operator(operator)(), occurrence)
            if changed is None:
                break
            pairs = list(zip(alone.splitlines(), changed.splitlines(), strict=False))
            rows = [at for at, (one, other) in enumerate(pairs) if one != other]
            if len(rows) != 1 or len(changed.splitlines()) != len(pairs) or first + rows[0] < node.body[0].lineno - 1:
                continue
            line, becomes = (each.strip() for each in pairs[rows[0]])
            if line.startswith(("raise ", "assert ", "#", '"', 'f"')):
                continue
            nth = sum(other.strip() == line for other in lines[first : first + rows[0]])
            mutant = Mutant(f"{module}:{name}", line, becomes, nth)
            with contextlib.suppress(SyntaxError):  # such as `not x := y`
                if code_of(compile(mutant.changed(source), "file", "exec"), name) != code_of(before, name):
                    yield mutant


def functions_of(place: Path) -> list[tuple[Path, str]]:
    """Return the functions of a file, or of all files of a folder, that are not compiled to machine code."""
    found = []
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for name, node in functions(ast.parse(file.read_text(encoding="utf-8"))):
            compiled = any("jit" in ast.unparse(each) for each in node.decorator_list) or "triton" in file.name
            if not compiled and not (name.startswith("_") and file.parent.name == "rules" and file.stem not in _ON_TENSORS):
                found.append((file, name))
    return found


def main() -> None:
    """Draw the list: one mutant of each function, functions by chance; then a second of each, where there are too few."""
    drawn, chance = list[Mutant](), random.Random(17)
    for place, count in SHARES.items():
        mine: list[Mutant] = []
        names = functions_of(ROOT / place)
        chance.shuffle(names)
        for turn in range(8):
            for file, name in names:
                if len(mine) < count and (
                    next_one := next(islice(mutants_of(file, name, random.Random(name)), turn, None), None)
                ):
                    mine.append(next_one)
        assert len(mine) == count, (place, len(mine))
        drawn += mine
    assert len(drawn) == MUTANTS, len(drawn)
    rows = [json.dumps({key: value for key, value in asdict(mutant).items() if value != 0}) for mutant in drawn]
    (Path(__file__).parent / "mutants.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
