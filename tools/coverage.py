"""Lists every numbered requirement beside the tests that show it.

Run `python tools/coverage.py` for the whole table, with `--missing` for what no test shows yet (which fails while there
is any), with names of groups (`C D 24 W S Q`) for those alone. A test shows a requirement when it carries
`@pytest.mark.covers("C24")` and would turn red without it. The markers are read from the sources; nothing is imported.

The numbers: C capabilities, D defects of the older client that are not to be repeated, 24 the edge cases of its
acceptance list, W weaknesses of the official client, S rules of a server, Q surprises of the older client's extras.
Where the design decided otherwise than the older clients, the words here are what was decided.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# ── the requirements, in our own words ───────────────────────────────────────────────────────────────────────────

CAPABILITIES = """
C01 settings in four tiers: argument, program default, environment, built-in; the first that says something wins
C02 settings that make no sense are refused when given, with a message that names them
C03 two presets of timeout and retries, chosen by argument, program or environment; explicit values win
C04 a proxy as URL or parts, its ports and its name and password as a header, used by every connection
C05 keys are masked and secret headers redacted wherever settings are shown
C06 the environment is read with care: trimmed, blank is unset, flags, lists and JSON in fixed forms, a snapshot
C07 a log level of the environment or the program is applied once, at the start; none leaves logging alone
C08 the package's version and the protocol's are two numbers, and the protocol's goes on the wire
C09 one tree of errors: type, status, category, whose fault it is, whether trying again may help
C10 everything shared is started on first use, once, however many start it at the same time
C11 connections by class of traffic, so that a flood of one does not starve another; addresses compared without case
C12 one way to make a request that every endpoint goes through, and that can be replaced
C13 the base URL's path stays; query: defaults under the path's own under the call's; None is left out
C14 the headers of every request, in an order in which the later one wins
C15 an idempotency key on whatever is not a GET: the same over retries of a call, a new one for each call
C16 the trace context travels when asked for, and never breaks a request
C17 a body is JSON or, with files, multipart; one that cannot be prepared is the caller's error
C18 what was not given, what is to be left out and None are three things in a body
C19 compressed answers are read
C20 each status has its outcome: data, nothing, a redirect's address, a typed error with what the server said
C21 Retry-After in seconds or milliseconds, any letter case; what cannot be read falls back
C22 which statuses are tried again, how often and after which waits; the server may overrule
C23 an answer with its status, headers, time and retries beside the data
C24 server-sent events: fed in any pieces, all line ends, comments, several data lines
C25 requests can be logged, with secrets redacted
C26 events of a request: start, stop with duration and retries, exception; with metadata
C27 the catalogue of endpoints: method, path, body, query, timeout and retries of each
C28 telemetry is posted in the background, and failures are only logged; or waited for
C29 creating a session: its fields on the wire, bounded in time, a bad answer is an error
C30 heartbeats: every ten seconds, kept through every kind of failure, a warning after two minutes
C31 heartbeats can be given up after so many failures or so long
C32 after a session is closed there is no further heartbeat
C33 a service client opens one session and closes what it opened
C34 a LoRA training run is created with its number in the session
C35 a LoRA configuration of parts; one that trains nothing is refused before anything is sent
C36 a training run from a saved state, with or without its optimizer; rank and flags from the checkpoint
C37 a sampling client of a base model or a checkpoint; neither is refused
C38 what the server offers
C39 a REST client from a service client
C40 async twins of all creators
C41 a run is bound to its model before it is handed out; a server may answer with a future
C42 operations of a run are numbered from one and submitted in order, results are waited for on their own
C43 large calls are cut by number of examples and by bytes, never into an empty piece
C44 forward_backward: outputs in order, metrics, gradient added
C45 forward: the same without a gradient
C46 optim_step applies the gradient
C47 what makes no sense is refused before a request is made: loss, settings, time to live
C48 a training state is saved under a name, for a time if asked
C49 a state is loaded, with or without its optimizer
C50 weights are saved for sampling
C51 a sampler of the weights as they are, in one call
C52 a sampling client of a path from a training client
C53 what a run trains; a run can be let go
C54 a training client's tokenizer, by the model's name or the server's word
C55 custom losses: forward, the user's function, a second pass with minus its gradient
C56 a fault in the background becomes an error of its own call, and the client lives on
C57 waiting for a result: how it is asked for, with which headers
C58 all forms of an answer to a poll are told apart; an unknown one is an error
C59 a budget of bytes for results being fetched, shared by server and key
C60 a refusal without a reason while polling is tried again a few times
C61 waits between polls can be chosen
C62 waiting with a time limit; waiting for many, in order, whatever becomes of each
C63 events of polls: failures and changes of the queue's state
C64 results of chunks are joined in order; differing kinds are warned about
C65 metrics of chunks are reduced by what their names end in
C66 a sampling client is bound to a sampling session, or given one
C67 sample: options, numbers from zero
C68 one sample's way: gate, pause, submit, wait, parse
C69 a pause after back-pressure, shared by all clients of a server and key, kept from others
C70 a gate for submissions: so many, fewer after back-pressure, so many bytes
C71 a byte budget that one large holder may overdraw; waiters in order
C72 samples are tried again: waits, bounds, a time without progress
C73 a bound on samples tried at once
C74 back-pressure pauses by the prompt's size or as long as the server asks, and its reason is told
C75 log-probabilities of a prompt
C76 samples as a stream, token by token
C77 a sampling client's tokenizer
C78 sizes are estimated: text, images, pointers, tensors
C79 every REST method and its async twin
C80 a scope is owned or accessible; others are refused before a request is made
C81 an archive that is being packed is asked for again, so often and so far apart
C82 checkpoint paths are taken apart, and others refused
C83 a time to live is checked before a request is made, and None is sent
C84 changes of the queue's state reach an observer, which may fail
C85 a paused queue is logged with its reason, once a minute
C86 a general way to try again: waits, jitter, progress, events
C87 the retry policy's numbers can be read
C88 a circuit breaker: closed, open, half open
C89 breakers by name, shared by threads
C90 the types: fields, defaults, checks, wire forms
"""

DEFECTS = """
D01 no empty first chunk when the first example alone is too big
D02 a sampler of a sampling session needs neither path nor base model
D03 saving for sampling always gives the typed answer
D04 a run whose state could not be loaded is closed, and its number is not used again
D05 is_lora false stays false
D06 a future of unknown form, or a failure without words, is an error and not a crash
D07 streams are streamed, compressed or not, without nulls, with the default query
D08 a stream of events with a bad status is an error
D09 a half-open breaker reserves its probe first, and counts exceptions
D10 closing a child client leaves the session's reporter alone
D11 one slow heartbeat does not delay the others
D12 only what may pass is tried again; an answer out of form is final
D13 numbers only go up, whatever is refused
D14 the configured proxy is used
D15 429 while polling backs off
D16 compute_logprobs honours its options
D17 one blank after a colon is dropped from an event, not all; a comment alone is no event
D18 a model that is created by a future is waited for
D19 a redirect that gave its address is a success
D20 Retry-After is bounded, and dates are understood
D21 times in bodies are ISO 8601
D22 a time limit is honoured by every call alike
D23 a heartbeat says its type
D24 try_again in any letter case is no result
D25 means over no outputs are zero
D26 a longer pause is not shortened by a later one
D27 the order of calls is the order in which they were made
D28 gate permits are held while submitting, not while waiting for results
D29 a pause is looked at again after waking
D30 no hidden limit of five seconds on any call
D31 a sample's limits for the exchange and for the result are two things
D32 opening a session is bounded in time
D33 the numbers in the older client's notes on pools differ from its real ones
D34 409 is tried again by the exchange and is still the caller's error
"""

CHECKLIST = """
24.config.1 precedence of all four tiers, for each field
24.config.2 an explicit False or empty list counts as given
24.config.3 a key has its prefix
24.config.4 forms of a proxy, default ports, the header of its name and password
24.config.5 masks of short and long keys
24.config.6 secrets are neither in the repr nor in the log of requests
24.config.7 the default feature gate
24.config.8 presets by argument, program and environment; an unknown one is the official client's
24.http.1 409, 408 and twice 503, then success
24.http.2 429 with retry-after-ms and with Retry-After in seconds, in any letter case
24.http.3 x-should-retry: false on 503, true on 400
24.http.4 one retry allowed is two requests
24.http.5 the category from the body; 422 is the user's fault and 500 the server's
24.http.6 refused connections and ones cut in the middle are connection errors
24.http.7 start and stop events with the class of traffic
24.http.8 twenty calls at once
24.http.9 Cloudflare headers present when configured, absent otherwise
24.http.10 which query wins
24.http.11 files make a body multipart
24.http.12 a wrapped answer's metadata
24.session.1 the project is on the wire
24.session.2 401 on heartbeats keeps the session, and warns after the window
24.session.3 a heartbeat fails with 500, then succeeds
24.session.4 a heartbeat without a connection pool is skipped with a warning
24.session.5 with no failures allowed the first one ends the heartbeats
24.session.6 a slow create_session within the timeout succeeds
24.session.7 a heartbeat has ten seconds and no retries whatever is configured
24.service.1 numbers 0 and 1 for two training clients and two sampling clients
24.service.2 rank, seed and flags are folded into the LoRA configuration
24.service.3 all flags false is refused, by both twins
24.service.4 a sampling client without a model is refused
24.service.5 flags are restored from the checkpoint's information
24.service.6 the variant with the optimizer
24.service.7 two services do not share anything of each other
24.training.1 1025 examples are two requests, numbers 1 and 2, joined
24.training.2 an invalid loss or setting makes no request
24.training.3 loss settings are brought to one form
24.training.4 a crash while polling is an error, and the client lives
24.training.5 background work without its supervisor is an error
24.training.6 a time to live of zero is refused
24.training.7 loading says whether the optimizer is wanted
24.training.8 a saved path comes from its name
24.training.9 save and sample with an answer of a path only, and of a session only; by both twins
24.training.10 images without a token count are sent
24.training.11 images of 4 MB and 3.5 MB are two requests
24.training.12 numbers of a whole run: forward 1 and 2, optim 3, save 4
24.custom.1 a sum of two log-probabilities gives weights of minus one
24.custom.2 forward has number 1, backward 2
24.custom.3 the user's metrics are merged
24.futures.1 each row of the poll's table: completed, pending, failed, try_again, deadline, 410, 400
24.futures.2 a connection error, then success, with one wait
24.futures.3 a held 408 is polled again at once, an early one and 5xx back off
24.futures.4 waits from a function of the caller
24.futures.5 a deadline gives the last failure
24.futures.6 metadata first, then the result
24.futures.7 two empty 400, then the result, in three requests
24.futures.8 an observer and an event hear the queue's reason
24.futures.9 410 with its category and the time it took
24.futures.10 waiting with a time limit
24.futures.11 waiting for many: order, one that crashes, one that stalls
24.sampling.1 number 0 is on the wire
24.sampling.2 429 pauses 1 s for a small prompt and 5 s for a large one, longer when the server asks
24.sampling.3 twenty samples after a 429 begin when the pause is over, with numbers of their own
24.sampling.4 accounts do not pause each other
24.sampling.5 clients of the same account share the pause
24.sampling.6 a concurrency of one lets one through
24.sampling.7 500 and 400 surface once without retries, and do not pause anybody
24.sampling.8 log-probabilities with None in them
24.sampling.9 the reason in a 429 is logged
24.sampling.10 a stream's chunks; 500 is an error; a closed client says so
24.rest.1 paths and parameters of every method
24.rest.2 an expiry as ISO 8601 and as an HTTP date
24.rest.3 an archive: 503, one wait, then the redirect
24.rest.4 a malformed path is refused
24.rest.5 scopes are checked
24.rest.6 the body of a time to live, to the letter
24.rest.7 403 and 404 surface
24.rest.8 async twins
24.types.1 enumerations are parsed
24.types.2 defaults
24.types.3 checks
24.types.4 what is None is left out where it has to be
24.types.5 round trips
24.types.6 times that are none stay as they are, or are refused in words
24.types.7 both forms of top-k entries
24.types.8 try_again is read strictly
24.code.1 gzip is read
24.code.2 the idempotency key stays the same over retries
24.code.3 the headers x-stainless, x-tinker and the one on back-pressure
24.code.4 a redirect without an address
24.code.5 x-should-retry on a good status
24.code.6 Retry-After as an HTTP date
24.code.7 empty 400 without end
24.code.8 a second answer of metadata only
24.code.9 the budget of response bytes holds fetches back
24.code.10 poll waits as a tuple and as the word exponential
24.code.11 404, 409 and 429 while polling
24.code.12 heartbeats given up after a time; sessions found again
24.code.13 ten at a time after back-pressure
24.code.14 429 and 410 make a sample be submitted again
24.code.15 a failed chunk ends the waiting for the later ones
24.code.16 custom losses: counts that differ, a loss that is no number, one that raises
24.code.17 empty data
24.code.18 a state that cannot be loaded into a new run
24.code.19 events split anywhere, with CR alone, with several data lines
24.code.20 error events in a stream
24.code.21 proxy settings on real connections
24.code.22 half-open breakers and calls at once
"""

WEAKNESSES = """
W01 a failed chunk does not wedge the client
W02 a cancelled or timed-out call does not wedge the client
W03 the key is in no telemetry, body or log
W04 the key does not follow redirects to another origin
W05 a nameless save sent again is the same request
W06 user code and encoding do not block the network loop
W07 async methods do not block the caller's loop
W08 errors do not wait for telemetry
W09 a failing or impatient server is not polled in a hot loop
W10 an unreachable server is named soon
W11 importing is quick, also for the command line
W12 BFLOAT16 tensors are read right
W13 the metrics reducer takes what comes
W14 configured timeouts are the real ones
W15 a client works, or says why it cannot, after a fork
W16 dropped clients stop their heartbeats
W17 errors have types and say what, where and why
W18 errors survive pickling
W19 connections of concurrent training requests are bounded
W20 an operation takes few round trips
W21 nothing is polled when nobody waits
W22 prompts are encoded cheaply
W23 409 is given up soon
W24 the same input follows the same rules everywhere
W25 every call returns a future that can be awaited and waited for
W26 a timeout means the same in threads and loops
W27 a rejected chunk leaves no partial batch behind
"""

SERVER_RULES = """
S1 passes as protobuf, plain or zstd, and as JSON; forward as JSON
S2 protobuf results where asked for, JSON for everything else
S3 conventions of protobuf bodies
S4 zstd bodies have a cap that is checked before memory is taken
S5 submissions give a receipt at once; samples with a name for each
S6 sessions, heartbeats, silence; checkpoints outlive them
S7 names of models; creating the same one again gives the same
S8 get_info, and a tokenizer that can be found offline
S9 LoRA: random A by seed, zero B, scale 32 over rank
S10 flags choose groups of layers; at least one
S11 order by number, whatever the order of arrival; a gap is given up in time
S12 the same request again is the same request; another under its number fails in band
S13 a failed operation uses its number up
S14 gradients add up until a step takes them; a failed pass adds nothing
S15 sums, never means; splits do not matter
S16 the losses, their defaults, unknown names and settings refused
S17 cross-entropy weights of any sign; none are ones; zero gives zero; tables of targets
S18 what custom losses need of cross-entropy
S19 lengths are checked and named; unknown inputs refused
S20 metrics are name:reduction, with loss:sum always
S21 outputs: log-probabilities for each position, in the data's order
S22 AdamW as torch has it, hyper-parameters from each request, clipping per adapter
S23 metrics of a step
S24 loading weights, with the optimizer when asked
S25 checkpoint names are unique by run and kind
S26 polls are held below the client's limit, then 408 with the queue's state
S27 results can be read again for a time; then gone; unknown ones are not found
S28 failures are results with a category, never 5xx
S29 batched polls and cancellation
S30 back-pressure on samples, never on training
S31 a sampler's weights never change
S32 nameless snapshots live as long as the session
S33 numbers of samples; one sent again is not drawn again
S34 stop rules
S35 log-probabilities are those of the distribution sampled from
S36 a seed decides, whatever else runs
S37 log-probabilities of prompts, top-k, targets
S38 what does not fit the window is refused first
S39 the grammar of paths
S40 archives: a redirect to a tar that needs no key
S41 the files of a checkpoint are PEFT's
S42 times to live, publishing, metadata
S43 written, flushed, renamed, then recorded
S44 what is there after a restart, and what is said of the rest
"""

SURPRISES = """
Q-1 hub files: the token is sent, writes are atomic, no way out of the directory
Q-2 a revision without a repository
Q-3 a branch is made for a revision
Q-4 archives and large files are streamed
Q-5 only its owner stops the reporter
Q-6 one flush timer
Q-7 an exception that is survived asks for a flush
Q-8 the same retries for both ways to send telemetry
Q-9 booleans and null stay what they are in events
Q-10 an incoming trace context is attached
Q-11 regularizers are callables or objects
Q-12 true gradients for KL and Consistency; async ones report zero with a warning
Q-13 a download's path is parsed before anything is removed
Q-14 a forced download swaps at the end, and leaves nothing behind
Q-15 the default output directory is the current one
Q-16 a missing key is told by every command
Q-17 an option given twice: the last wins
Q-18 progress goes to stderr
Q-19 lists end at an empty page
Q-20 sizes stop at TB
Q-21 text as path or content, bytes always content
Q-22 names in multipart bodies are escaped
Q-23 an example masks the key
Q-24 streams give chunks as they come, and keep the error's words
Q-25 events: one blank, none without data, split anywhere
Q-26 a half-open breaker reserves its place
Q-27 a regularizer that is no number is summed in both places
Q-28 an example that is to be skipped stops
Q-29 a stale cached checkpoint falls back to the list
"""

NOT_APPLICABLE = {
    "D33": "a slip in the older client's own notes; there is nothing that could behave wrongly",
    "24.session.4": "connection pools are made when used: a heartbeat cannot find its own missing",
    "24.training.5": "there is no supervisor process that could be absent: the loop thread starts when first needed",
}
"""What makes no sense here, and why."""


def _rows(*tables: str) -> dict[str, str]:
    pairs = [line.split(" ", 1) for table in tables for line in table.strip().splitlines()]
    rows = dict(pairs)
    assert len(rows) == len(pairs), "a number is listed twice"
    return rows


EXTRAS = """
1.1.1 tokenizer operations
1.1.2 tokenizer ids are resolved in a fixed order
1.1.3 tokenizers are loaded once and kept
1.1.4 Kimi K2 tokenizers
1.1.5 bad input to tokenizers
1.1.6 model input from text
1.2.1 files from the hub, cached
1.2.2 the hub's token
1.2.3 an adapter is pushed to the hub
1.3 tokenizer helpers of the clients
1.4.1 the event bus
1.4.2 the catalogue of events
1.4.3 the console logger
1.4.4 starting a reporter
1.4.5 how telemetry is sent
1.5.1 a reporter's options
1.5.2 a reporter's calls
1.5.3 what waits and when it is flushed
1.5.4 how sending is tried again
1.5.5 what is sent
1.5.6 whose fault an exception is
1.5.7 typed helpers of telemetry
1.6 exceptions are captured
1.7 providers of telemetry
1.8 OpenTelemetry
1.9 environment variables of the extras
1.10 metrics
1.11.1 recovery policy
1.11.2 recovery monitor
1.11.3 recovery executor
1.11.4 recovery events
1.12.1 regularizers are composed
1.12.2 what a regularizer is
1.12.3 regularizers are executed
1.12.4 gradients of regularizers are tracked
1.12.5 the pipeline of regularizers
1.12.6 what regularizers give
1.12.7 events of regularizers
1.12.8 the eight regularizers
1.12.9 the numbers regularizers must give
1.13 custom losses with regularizers
1.14.1 the address of an archive
1.14.2 checkpoints are downloaded
1.14.3 archives are unpacked safely
1.15 tinker paths and lifetimes
1.16.1 the command line: help, exit codes, common options, errors on stderr
1.16.2 every command with its options, and what is missing told before anything is sent
1.16.3 a checkpoint is saved and written down by one command
1.16.4 samples by one command: prompts, output, whose fault a failure is
1.16.5 lists by pages; what each command prints, for people and for programs
1.16.6 many are deleted after a question, and failures do not stop the rest
1.16.7 sizes, times and states in words
1.17 files and forms
"""
"""Sections of what surrounds the core: telemetry, metrics, recovery, regularizers and so on."""

REQUIREMENTS = _rows(CAPABILITIES, DEFECTS, CHECKLIST, WEAKNESSES, SERVER_RULES, SURPRISES, EXTRAS)


def group_of(number: str) -> str:
    """The group a number belongs to: C, D, 24, W, S, Q, or 1 for the extras."""
    return number.partition(".")[0] if number[0].isdigit() else number[0]


# ── the markers ──────────────────────────────────────────────────────────────────────────────────────────────────


class MarkerError(Exception):
    """A marker that says nothing: of an unknown number, not a plain text, or on what is no test."""


def _is_mark(node: ast.AST, name: str) -> bool:
    """Whether a node is pytest.mark.NAME, or mark.NAME."""
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return False
    owner = node.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) == "mark"


def _is_pytestmark(node: ast.Assign) -> bool:
    """Whether an assignment marks all tests beside it."""
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


def _markers(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and _is_mark(inner.func, "covers"):
                yield inner


def _runs(decorators: Sequence[ast.expr]) -> bool:
    """Whether a test is run and may fail: one that is skipped or expected to fail shows nothing."""
    bare = [node.func if isinstance(node, ast.Call) else node for node in decorators]
    return not any(_is_mark(node, name) for node in bare for name in ("skip", "xfail"))


def _numbers(marker: ast.Call, place: str) -> list[str]:
    numbers = []
    for argument in marker.args:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise MarkerError(f"{place}:{marker.lineno}: a number must be written out as text")
        if argument.value not in REQUIREMENTS:
            raise MarkerError(f"{place}:{marker.lineno}: there is no requirement {argument.value!r}")
        numbers.append(argument.value)
    if marker.keywords or not numbers:
        raise MarkerError(f"{place}:{marker.lineno}: a marker names at least one number, and nothing else")
    return numbers


def read_markers(source: str, name: str) -> list[tuple[str, str]]:
    """The (number, test) pairs of a test module; the tests are named as pytest names them.

    Raises:
        MarkerError: A marker that says nothing.
    """
    pairs: list[tuple[str, str]] = []
    used: set[ast.Call] = set()

    def visit(body: Sequence[ast.stmt], prefix: str, inherited: list[str], counts: bool) -> None:
        above = list(inherited)
        for node in body:
            if isinstance(node, ast.Assign) and _is_pytestmark(node):
                for marker in _markers([node.value]):
                    used.add(marker)
                    above += _numbers(marker, name)
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            own = list(_markers(node.decorator_list))
            numbers = [number for marker in own for number in _numbers(marker, name)]
            runs = counts and _runs(node.decorator_list)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::", above + numbers, runs)
            elif node.name.startswith("test_"):
                pairs.extend((number, f"{prefix}{node.name}") for number in dict.fromkeys(above + numbers) if runs)
            elif own:
                raise MarkerError(f"{name}:{node.lineno}: {node.name} is no test")
            used.update(own)

    tree = ast.parse(source, name)
    visit(tree.body, f"{name}::", [], True)
    for marker in _markers([tree]):
        if marker not in used:
            raise MarkerError(f"{name}:{marker.lineno}: this marker marks no test")
    return pairs


def collect(tests: Path) -> dict[str, list[str]]:
    """The tests that show each number, from every test module under a directory."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for number, test in read_markers(path.read_text(encoding="utf-8"), path.relative_to(tests).as_posix()):
            found.setdefault(number, []).append(test)
    return found


def missing(found: Mapping[str, Sequence[str]], groups: Sequence[str] = ()) -> list[str]:
    """The numbers without a test that should have one."""
    return [
        number
        for number in REQUIREMENTS
        if number not in found and number not in NOT_APPLICABLE and (not groups or group_of(number) in groups)
    ]


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────


def table(found: Mapping[str, Sequence[str]], groups: Sequence[str] = ()) -> str:
    """Every number, what it asks for, and the tests that show it, as a table in Markdown."""
    lines = ["| number | what | tests |", "|---|---|---|"]
    for number, what in REQUIREMENTS.items():
        if groups and group_of(number) not in groups:
            continue
        shown = "<br>".join(found.get(number, ()))
        if not shown and number in NOT_APPLICABLE:
            shown = f"does not apply: {NOT_APPLICABLE[number]}"
        lines.append(f"| {number} | {what} | {shown or '**none**'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(description="Lists requirements beside the tests that show them.")
    groups = list(dict.fromkeys(group_of(number) for number in REQUIREMENTS))
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"only these groups, of {', '.join(groups)}")
    parser.add_argument("--missing", action="store_true", help="list those without a test, and fail if there are any")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="where the tests are")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(groups):
        parser.error(f"there is no group {min(unknown)!r}; there are {', '.join(groups)}")
    try:
        found = collect(options.tests)
    except MarkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.missing:
        print(table(found, options.groups))
        return 0
    left = missing(found, options.groups)
    for number in left:
        print(f"{number} | {REQUIREMENTS[number]}")
    asked = [number for number in REQUIREMENTS if not options.groups or group_of(number) in options.groups]
    print(f"{len(left)} of {len(asked)} requirements have no test", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
