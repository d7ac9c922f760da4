"""`diptych doctor`: what this machine offers a worker, and what would go wrong.

Each check is a function of the options that gives one or more findings; nothing is changed, and
each has a deadline. Exit code 1 if something will not work at all.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from diptych.doctor_checks import CHECKS as HOST_CHECKS
from diptych.doctor_checks import Finding, Level, Options
from diptych.doctor_transfers import CHECKS as TRANSFER_CHECKS

_log = logging.getLogger(__name__)

Check = Callable[[Options], Iterable[Finding]]
_MARKS = {Level.OK: "ok", Level.WARN: "WARN", Level.FAIL: "FAIL"}


def main(args: argparse.Namespace) -> int:
    """Check, print, judge."""
    options = Options(
        redis=args.redis, ports=tuple(args.ports), host=args.host, transfers=args.transfers
    )
    findings = examine(options, [*HOST_CHECKS, *TRANSFER_CHECKS])
    if args.json:
        rows = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _table(findings)))
    return int(any(finding.level is Level.FAIL for finding in findings))


def examine(options: Options, checks: Sequence[Check]) -> list[Finding]:
    """All findings, in order; a check that breaks is a finding itself."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(options)
        except Exception as error:
            _log.debug("a check broke", exc_info=True)
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding(name, Level.WARN, f"could not be checked: {error}"))
    return findings


def _table(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    return [f"{_MARKS[f.level]:<4}  {f.name:<{width}}  {f.text}" for f in findings]
