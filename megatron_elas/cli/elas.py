"""``elas``: looks at a running job, strikes it, and checks the installation."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import connect

from megatron_elas.control.environment import TOKEN_VARIABLE
from megatron_elas.control.messages import Answer, BadMessage, InjectRequest, StatusRequest, decode_answer, encode
from megatron_elas.control.run_dir import find_jobs
from megatron_elas.control.wire import OPTIONS, make_headers
from megatron_elas.spec.errors import BadUsage, ElasticError, ExitCode
from megatron_elas.spec.faults import GRAMMAR, parse_fault

ANSWER_TIMEOUT_S = 10.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message}; elas --help lists the commands")


def build_parser() -> argparse.ArgumentParser:
    """The commands."""
    parser = _Parser(prog="elas", description="Looks after elastic training jobs.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, text in (("status", "where a job is"), ("inject", "strike a worker of a running job")):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        if name == "inject":
            command.add_argument("fault", help=GRAMMAR)
        command.add_argument("--controller", metavar="ws://HOST:PORT", help="default: the newest job on this node")
    commands.add_parser("doctor", help="check the installed Megatron against what is attached to it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    try:
        flags = build_parser().parse_args(argv)
        match flags.command:
            case "doctor":
                return diagnose()
            case "inject":
                request: InjectRequest | StatusRequest = InjectRequest(fault=str(parse_fault(flags.fault)))
            case _:
                request = StatusRequest()
        answer = ask(*find_controller(flags.controller, os.environ.get(TOKEN_VARIABLE)), request)
    except ElasticError as error:
        print(f"elas: {error}", file=sys.stderr)
        return error.exit_code
    print(answer.text, file=sys.stdout if answer.ok else sys.stderr)
    return ExitCode.FINISHED if answer.ok else ExitCode.BAD_USAGE


def find_controller(address: str | None, token: str | None) -> tuple[str, str]:
    """Address and token of a job.

    Raises:
        BadUsage: No job runs here, or the token of the one at ``address`` is not known.
    """
    jobs = find_jobs()
    if address is None:
        if not jobs:
            raise BadUsage("no job of yours runs on this node: name one with --controller ws://HOST:PORT")
        return jobs[-1].address, jobs[-1].token
    for job in jobs:
        if job.address == address:
            return address, job.token
    if token is None:
        raise BadUsage(f"the secret of the job at {address} is not known here: set {TOKEN_VARIABLE}")
    return address, token


def ask(address: str, token: str, request: InjectRequest | StatusRequest) -> Answer:
    """One question, one answer.

    Raises:
        ElasticError: Nobody answers, or not to us.
    """
    try:
        with connect(address, additional_headers=make_headers(token), proxy=None, **OPTIONS) as connection:
            connection.send(encode(request))
            return decode_answer(connection.recv(timeout=ANSWER_TIMEOUT_S))
    except InvalidURI as error:
        raise BadUsage(f"--controller must be ws://HOST:PORT, got '{address}'") from error
    except (OSError, InvalidHandshake, ConnectionClosed, BadMessage) as error:
        raise ElasticError(f"the controller at {address} does not answer: {error}") from error


def diagnose() -> int:
    """Compare the installed Megatron with what is attached to it; 6 when something moved."""
    # Loaded here only: it imports torch and Megatron, which no other command needs.
    seams = importlib.import_module("megatron_elas.host.seams")
    findings = seams.check_all()
    for finding in findings:
        print(f"{finding.id}: {finding.problem}")
    if findings:
        return ExitCode.WRONG_VERSION
    print("everything that is attached to Megatron is where it should be")
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
