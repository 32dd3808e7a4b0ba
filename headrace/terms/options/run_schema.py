"""The JSON schema of a run's YAML file, by which editors complete keys and mark wrong values.

Invariant: it is made from the declarations, so it has every key, help and limit that `headrace train` has.
"""

from headrace.terms.options.declared import Declaration
from headrace.terms.options.option_kinds import Schema
from headrace.terms.options.run_options import NodeOptions


def run_schema() -> Schema:
    """Return the schema (draft 7, which editors read best). A node's file has more keys, which a run's may not use."""
    declared = NodeOptions.declarations()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "run.yaml of headrace",
        "type": "object",
        "properties": {each.key: _property(each) for each in declared},
        "required": [each.key for each in declared if each.required],
        "additionalProperties": False,
    }


def _property(declaration: Declaration) -> Schema:
    said, found = {"description": declaration.command_help}, declaration.kind.schema()
    return {**said, "anyOf": [found, {"type": "null"}]} if declaration.optional else {**said, **found}
