"""The jobs that run on this node: which one is meant, and a question to its controller. For ``elas``' commands."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Sequence

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from megatron_elas.control.environment import TOKEN_VARIABLE
from megatron_elas.control.messages import (
    Answer,
    BadMessage,
    DrainRequest,
    InjectRequest,
    RebalanceRequest,
    StatusRequest,
    decode_answer,
    encode,
)
from megatron_elas.control.run_dir import JobFile, find_jobs
from megatron_elas.control.wire import dial
from megatron_elas.proof import NotAMember
from megatron_elas.spec.errors import BadUsage, ElasticError, ExitCode

Request = DrainRequest | InjectRequest | RebalanceRequest | StatusRequest

ANSWER_TIMEOUT_S = 10.0
PLANNING_TIMEOUT_S = 120.0
"""For an answer that a plan has to be made for."""
LEAVING_TIMEOUT_S = 600.0
"""For workers to leave: a plan is made, and state goes over beside some steps."""
LONGEST_COMMAND = 60
"""Characters of a job's command that are shown."""


def add_choice_of_job(parser: argparse.ArgumentParser) -> None:
    """Flags that say which job is meant."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="RUN_ID", help="its run id, or how it begins; default: the only job here")
    which.add_argument("--controller", metavar="ws://HOST:PORT", help="where its controller listens")


def ask_job(flags: argparse.Namespace, request: Request, separator: str, timeout_s: float = ANSWER_TIMEOUT_S) -> int:
    """Ask the job that the flags mean, and print whose answer it is, the separator, and the answer."""
    address, token = find_controller(flags.controller, flags.job, os.environ.get(TOKEN_VARIABLE))
    answer = ask(address, token, request, timeout_s)
    text = f"job {answer.run_id} at {address}:{separator}{answer.text}"
    print(text, file=sys.stdout if answer.ok else sys.stderr)
    return ExitCode.FINISHED if answer.ok else ExitCode.BAD_USAGE


def find_job(run_id: str | None) -> JobFile:
    """The job that is meant.

    Args:
        run_id: The job's, or how it begins; None: the only one here.

    Raises:
        BadUsage: No job runs here, or more than one could be meant.
    """
    return _choose_job(find_jobs(), run_id)


def find_controller(address: str | None, run_id: str | None, token: str | None) -> tuple[str, str]:
    """Address and token of a job.

    Args:
        address: Of its controller, if given.
        run_id: The job's, or how it begins, if given.
        token: What the environment says; for a controller that no job on this node belongs to.

    Raises:
        BadUsage: No job runs here, more than one could be meant, or the token of the one at ``address`` is not known.
    """
    jobs = find_jobs()
    if address is None:
        job = _choose_job(jobs, run_id)
        return job.address, job.token
    for job in jobs:
        if job.address == address:
            return address, job.token
    if token is None:
        raise BadUsage(f"the secret of the job at {address} is not known here: set {TOKEN_VARIABLE}")
    return address, token


def _choose_job(jobs: Sequence[JobFile], run_id: str | None) -> JobFile:
    # Two nodes of one job may run on one machine: same name, secret and port.
    distinct = list({(job.run_id, job.token, job.address.rpartition(":")[2]): job for job in jobs}.values())
    if not distinct:
        raise BadUsage(
            "no job of yours runs on this node: wait until it has started, or name one with --controller ws://HOST:PORT"
        )
    meant = [job for job in distinct if job.run_id.startswith(run_id or "")]
    exact = [job for job in meant if job.run_id == run_id]
    match exact or meant:
        case [job]:
            return job
        case []:
            raise BadUsage(f"no job of yours on this node has a run id that begins with '{run_id}': {_list(distinct)}")
        case several:
            way = "--controller" if exact else "--job RUN_ID"
            raise BadUsage(f"{len(several)} jobs of yours run on this node, name one with {way}: {_list(several)}")


def _list(jobs: Sequence[JobFile]) -> str:
    return "; ".join(
        f"{job.run_id} at {job.address} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(job.started_s))} "
        f"({textwrap.shorten(' '.join(job.command), LONGEST_COMMAND, placeholder=' …')})"
        for job in jobs
    )


def ask(address: str, token: str, request: Request, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """One question, one answer, for which it waits so long.

    Raises:
        ElasticError: Nobody answers, or not to us.
    """
    try:
        with dial(address, token) as connection:
            connection.send(encode(request))
            return decode_answer(connection.recv(timeout=timeout_s))
    except InvalidURI as error:
        raise BadUsage(f"--controller must be ws://HOST:PORT, got '{address}'") from error
    except NotAMember as error:
        raise ElasticError(
            f"the controller at {address} does not share the secret that is known here: set {TOKEN_VARIABLE}"
        ) from error
    except TimeoutError as error:
        raise ElasticError(
            f"the controller at {address} has not answered within {timeout_s:g} s, and may still do what it was asked "
            f"for: see elas status"
        ) from error
    except (OSError, InvalidHandshake, ConnectionClosed, BadMessage) as error:
        raise ElasticError(f"the controller at {address} does not answer: {error}") from error
