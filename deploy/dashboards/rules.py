"""The chart's recording rules and alerts against a Prometheus: does every expression have data?

Prometheus need not have the rules: a record that an expression reads is replaced by the expression of that record. An
alert is evaluated without its comparison with a number, because it has no data while all is well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml
from deploy.dashboards.live import CannotCheck, Span, series_of, why_empty

# Rule -> the part of an install without which it must have no data. Every other rule must have some in every run: the
# services report what never happened as 0, also for Modal, so that the first time is seen.
EXPECTED_EMPTY: Mapping[str, str] = {"NousCoderCertificateExpires": "tls"}
PARTS = frozenset(EXPECTED_EMPTY.values())
_COMPARISONS = frozenset({"==", "!=", "<", ">", "<=", ">="})
_STRING = r'"(?:\\.|[^"\\])*"'
_READ = re.compile(rf'{_STRING}|(?P<name>[A-Za-z_:][\w:]*)(?P<labels>\{{(?:{_STRING}|[^"{{}}])*\}})?')


@dataclass(frozen=True, slots=True)
class Rule:
    """A recording rule or an alert, by its name."""

    name: str
    expr: str
    is_alert: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule whose data are not as expected, the reason, and the expression that was evaluated."""

    rule: str
    reason: str
    expr: str


def rules_of(text: str) -> list[Rule]:
    """The rules of a PrometheusRule, or of a file of rules, as YAML or JSON. Raises CannotCheck."""
    try:
        trees = [tree for tree in yaml.safe_load_all(text) if tree]
        groups = [group for tree in trees for group in tree.get("spec", tree)["groups"]]
        found = [
            Rule(rule.get("alert") or rule["record"], rule["expr"], "alert" in rule)
            for group in groups
            for rule in group["rules"]
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise CannotCheck(f"these are no rules: {error!r}") from None
    if not found:
        raise CannotCheck("there is no rule")
    return found


def without_comparison(expr: str) -> str:
    """An alert's expression without its comparison with a number, on both sides of `and`, and without what is behind
    `unless`. Raises CannotCheck.
    """
    node = _parsed(expr)
    while isinstance(node, promql_parser.ParenExpr):
        node = node.expr
    if not isinstance(node, promql_parser.BinaryExpr):
        return expr
    if str(node.op) == "unless":
        return without_comparison(str(node.lhs))
    if str(node.op) == "and":
        left, right = without_comparison(str(node.lhs)), without_comparison(str(node.rhs))
        return f"({left}) and {node.modifier or ''} ({right})"
    if str(node.op) in _COMPARISONS and isinstance(node.rhs, promql_parser.NumberLiteral):
        return str(node.lhs)
    return expr


def resolved(expr: str, records: Mapping[str, str]) -> str:
    """The expression with those of the records that it reads in their place, and so on."""

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in records:
            return match[0]
        others = {other: own for other, own in records.items() if other != name}
        return f"({resolved(records[name], others)})"

    return _READ.sub(replaced, expr)


def check(url: str, rules: Sequence[Rule], parts: Collection[str], span: Span) -> list[Finding]:
    """The rules without data that should have some, and the other way round. `parts`: what the install has of PARTS.

    Raises CannotCheck.
    """
    return [finding for rule in rules for finding in _checked(url, rule, rules, parts, span)]


def _checked(url: str, rule: Rule, rules: Sequence[Rule], parts: Collection[str], span: Span) -> Iterator[Finding]:
    records = {one.name: one.expr for one in rules if not one.is_alert}
    expr = resolved(without_comparison(rule.expr) if rule.is_alert else rule.expr, records)
    series = series_of(url, expr, span)
    reason = why_empty(series, "")
    part = EXPECTED_EMPTY.get(rule.name)
    if isinstance(series, str) or (reason and (part is None or part in parts)):
        yield Finding(rule.name, reason, expr)
    elif not reason and part is not None and part not in parts:
        yield Finding(rule.name, f"it has data, and must have none without {part}", expr)
    if isinstance(series, list) and not reason:
        yield from _unread(rule, rules, series)


def _unread(rule: Rule, rules: Sequence[Rule], series: list[dict[str, Any]]) -> Iterator[Finding]:
    """For a record: the selectors of other rules by which none of its series is found."""
    for reader in rules:
        for match in _READ.finditer(reader.expr):
            if match["name"] != rule.name:
                continue
            selector = _parsed(match[0])
            assert isinstance(selector, promql_parser.VectorSelector)
            wanted = {one.name: one.value for one in selector.matchers.matchers}
            if not any(wanted.items() <= one["metric"].items() for one in series):
                yield Finding(reader.name, f"no series of the record {rule.name} has these labels", match[0])


def _parsed(expr: str) -> promql_parser.Expr:
    try:
        return promql_parser.parse(expr)
    except ValueError as error:
        raise CannotCheck(f"{expr} is no expression: {error}") from None
