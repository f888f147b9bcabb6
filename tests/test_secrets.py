"""A key is planted wherever one can come from, a wide programme is run, and whatever leaves the
process is searched."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import logging
import pickle
import tarfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from hub import Hub, hub_server
from support import Keyed, Wire, pass_json, sample_json, serving, step_json
from tinkex import (
    HttpClient,
    ModelInput,
    RecoveryPolicy,
    RestClient,
    RetryConfig,
    SamplingParams,
    ServiceClient,
    events,
    metrics,
    otel,
    telemetry,
    types,
)
from tinkex.client.settings.config import Config, mask_api_key
from tinkex.engine.fake import FakeEngine
from tinkex.hub import downloads
from tinkex.hub.hub_files import resolve_file
from tinkex.hub.pushes import push_checkpoint_adapter
from tinkex.recovery.monitor import Executor
from tinkex.server.access.keys import create_key
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec, redaction

KEY = "tml-Zq7vPlantedKeyBx93RtWm2Lk8Dd"
OTHER_KEY = "tml-Ty4hForeignKeyQn61VcXs0Jg5Ff"
GATE = "Gate/Secret+9fKqZw3=Pp"
HEADER = "HeaderSecretXk28vBn40Lm"
QUERY = "QueryTokenHs75yDf19Rt"
PASSWORD = "p@ss/Word+Uj63nCe82Aq"
HF = "hf_HuggingTokenWb47mKo92Ze"
SIGNED = "SignedAddressNv30xPi58Gu"
SECRETS = (KEY, OTHER_KEY, GATE, HEADER, QUERY, PASSWORD, HF, SIGNED)

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=1, seed=1)
STEP = types.AdamParams(learning_rate=0.1)
DATA = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4]})]
FINAL = {"x-should-retry": "false"}

# ── what is looked for ────────────────────────────────────────────────────────────────────────────


def windows(text: str, size: int) -> set[str]:
    return {text[at : at + size] for at in range(len(text) - size + 1)}


def forms(secret: str) -> set[str]:
    """Pieces of a secret that are more than a mask shows: as it is, in a URL, in base64 at any
    place, in hex."""
    found = windows(secret, 8)
    for written in (quote(secret, safe=""), quote_plus(secret)):
        found |= windows(written, 10)
    # base64 takes three bytes at a time: where they begin decides what they look like
    for before in range(3):
        code = base64.b64encode(b"x" * before + secret.encode()).decode()
        found |= windows(code[4 if before else 0 :].rstrip("=")[:-2], 12)
    return {piece.lower() for piece in found | windows(secret.encode().hex(), 16)}


NEEDLES = {secret: forms(secret) for secret in SECRETS}


def leaks(text: str) -> list[str]:
    """Return the places where a text reveals a secret."""
    lower, found = text.lower(), []
    for secret, needles in NEEDLES.items():
        for needle in needles:
            if (at := lower.find(needle)) >= 0:
                found.append(f"{secret[:6]}…: {text[max(0, at - 120) : at + 60]!r}")
                break
    return found


class Everything(logging.Handler):
    """All that leaves the process, or that a program may print."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.parts: list[tuple[str, str]] = []

    def note(self, place: str, *texts: object) -> None:
        self.parts += [(place, text if isinstance(text, str) else repr(text)) for text in texts]

    def emit(self, record: logging.LogRecord) -> None:
        line = logging.Formatter("%(name)s %(message)s").format(record)
        facts = {name: value for name, value in vars(record).items() if name != "exc_info"}
        self.note(f"the log {record.name}", line, str(facts))

    def hear(self, name: str, numbers: Any, facts: Any) -> None:
        self.note(f"the event {name}", str(numbers), str(dict(facts)))
        for value in facts.values():
            if isinstance(value, BaseException):
                self.confess(value)

    def confess(self, error: BaseException) -> None:
        """All that an error and those behind it say."""
        place = f"the error {type(error).__name__}"
        self.note(place, "".join(traceback.format_exception(error)), pickle_of(error))
        one: BaseException | None = error
        while one is not None:
            self.note(place, str(one), repr(one), repr(vars(one)), repr(one.args))
            response = getattr(one, "response", None)
            if isinstance(response, tinkex.wire.redacted_http.Response):
                self.note(
                    place,
                    repr(response.content),
                    repr(dict(response.headers)),
                    repr(response.request),
                )
            one = one.__cause__ or one.__context__

    def show(self, *things: object) -> None:
        """Return the ways in which a program prints an object."""
        for thing in things:
            self.note(f"a {type(thing).__name__}", str(thing), repr(thing), f"{thing}")

    def read(self, *places: Path) -> None:
        """All bytes of all files under directories, and their names."""
        for place in places:
            for path in place.rglob("*"):
                self.note("a file's name", str(path))
                if path.is_file():
                    self.note(f"the file {path.name}", path.read_bytes().decode("latin-1"))

    def sent(self, server: FaultyServer, *, own: Iterable[str] = ()) -> None:
        """What a server was sent: `own` are the headers for its secrets; the query of its address
        is its own too."""
        allowed = set(own)
        for seen in server.seen:
            headers = {name: value for name, value in seen.headers.items() if name not in allowed}
            path = seen.path.partition("?")[0]
            self.note(
                f"the wire, {seen.method} {path}", path, repr(headers), seen.body.decode("latin-1")
            )

    def check(self) -> None:
        assert len(self.parts) > 20, "nothing was heard"
        if leaks("\n".join({text for _, text in self.parts})):
            found = [f"{place}: {leak}" for place, text in self.parts for leak in leaks(text)]
            raise AssertionError("\n".join(dict.fromkeys(found[:20])))


def pickle_of(error: BaseException) -> str:
    try:
        return pickle.dumps(error).decode("latin-1")
    except Exception as failure:  # of another library: it does not leave the process in this way
        return repr(failure)


class Spans:
    """A tracer that keeps what it is told, in place of an exporter."""

    def __init__(self, everything: Everything) -> None:
        self._everything = everything

    def start_span(self, name: str, **facts: Any) -> Any:
        from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan

        everything = self._everything
        everything.note("a span", name, str(facts))

        class Span(NonRecordingSpan):
            def set_attributes(self, attributes: Any) -> None:
                everything.note("a span", str(attributes))

            def set_attribute(self, key: str, value: Any) -> None:
                everything.note("a span", f"{key} {value}")

            def set_status(self, status: Any, description: str | None = None) -> None:
                everything.note(
                    "a span", f"{status.status_code} {status.description} {description}"
                )

        return Span(INVALID_SPAN_CONTEXT)


@pytest.fixture
def everything(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Everything]:
    """Listens at every place at once while a test runs, and is the judge of it in the end."""
    heard, root = Everything(), logging.getLogger()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.001)
    monkeypatch.setattr("tinkex.telemetry.sending.retry_delay", lambda *_: 0.001)
    levels = {
        name: logging.getLogger(name).level
        for name in ("", "tinkex", "aiohttp", "asyncio", "huggingface_hub")
    }
    for name in levels:
        logging.getLogger(name).setLevel(logging.DEBUG)
    root.addHandler(heard)
    events.attach("everything", None, heard.hear)
    handlers = ["everything", telemetry.attach_logger(events=list(events.CATALOGUE), level="debug")]
    if importlib.util.find_spec("opentelemetry") is not None:
        handlers.append(otel.trace(Spans(heard)))
    metrics.configure()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield heard
        heard.note("warnings", *(str(warning.message) for warning in warned))
        printed = capfd.readouterr()
        heard.note("stdout", printed.out)
        heard.note("stderr", printed.err)
        heard.note("metrics", metrics.to_prometheus(), str(metrics.snapshot()))
        heard.check()
    finally:
        for handler in handlers:
            events.detach(handler)
        root.removeHandler(heard)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        metrics.configure()
        tinkex.configure()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """The server that the key is for, taken for the hosted service: it is sent telemetry too."""
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_TELEMETRY", "1")
        monkeypatch.setattr("tinkex.client.settings.config.HOSTED_URL", server.base_url)
        monkeypatch.setattr("tinkex.telemetry.sending.HOSTED_URL", server.base_url)
        server.script("telemetry", echo_of(KEY)(500), Answer(body={"status": "accepted"}))
        yield server


@pytest.fixture
def foreign() -> Iterator[FaultyServer]:
    """Another's server, which is to see nothing."""
    with faulty_server() as server:
        yield server


# ── the programme ─────────────────────────────────────────────────────────────────────────────────

Echo = Callable[[int], Answer]


def echo_of(*secrets: str) -> Echo:
    """Answers that say secrets back: in their words, their fields, their headers, plain and
    encoded."""
    text = " ".join(secrets)
    coded = [base64.b64encode(secret.encode()).decode() for secret in secrets]
    headers = {
        "X-Echo": text,
        "Set-Cookie": text,
        "Retry-After": text,
        "X-Coded": quote(text),
        **FINAL,
    }
    said = {
        "detail": f"bad key {text}",
        "echo": [{"key": text, text: quote(secrets[0], safe="")}],
        "coded": coded,
    }
    return lambda status: Answer(status, {**said, "session_id": [text]}, headers)


def failures(echo: Echo) -> list[Answer]:
    """Every way in which a request fails, most of them with the secrets in their words."""
    said = echo(200)
    page = replace(
        said,
        status=502,
        body=b"<html><title>" + said.data + b"</title></html>",
        content_type="text/html",
    )
    words = replace(said, body=b"you said " + said.data, content_type="text/plain")
    refused = [echo(status) for status in (401, 403, 404, 409, 422, 429, 500)]
    return [*refused, page, words, said, Answer(drop=True)]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def failing(everything: Everything, *kinds: type[BaseException]) -> Iterator[None]:
    """Expect a failure inside, and record the error."""
    with pytest.raises(kinds or (tinkex.TinkerError,)) as caught:
        yield
    everything.confess(caught.value)


def use(
    service: ServiceClient,
    server: FaultyServer,
    everything: Everything,
    echo: Echo,
    answers: list[Answer],
) -> None:
    """Train and sample, with success and with failures of many kinds."""
    stepped = Answer(body={"metrics": {}})
    drawn = SampleResponse([SampledSequence("length", tokens_np=np.array([1], np.int32))])
    result = Answer(body=codec.encode(drawn).data, content_type=codec.PROTOBUF)
    server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    server.script("retrieve_future", Answer(body={"model_id": "s:train:0"}))
    server.script("optim_step", Answer(body={"request_id": "r"}))
    server.script("asample", Answer(body={"request_id": "q"}))
    training = service.create_lora_training_client("m").result()
    sampler = service.create_sampling_client(
        base_model="m", retry_config=RetryConfig(enable_retry_logic=False)
    ).result()
    server.script(
        "retrieve_future",
        Answer(408, {"queue_state": "paused_capacity", "queue_state_reason": f"busy with {KEY}"}),
        stepped,
    )
    training.optim_step(STEP).result(10)
    for answer in answers:
        server.script("optim_step", answer, echo(422))
        with failing(everything):
            training.optim_step(STEP).result(10)
    server.script("optim_step", Answer(body={"request_id": "r"}))
    failed = [Answer(body={"error": f"for {KEY}", "category": "user"}), Answer(body=[KEY])]
    for answer in (echo(401), echo(500), *failed):
        server.script("retrieve_future", answer, echo(410))
        with failing(everything):
            training.optim_step(STEP, timeout=1).result(10)
    server.script("retrieve_future", result)
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    for status in (401, 403, 500, 429):  # the last one makes the next sample wait
        server.script("asample", echo(status))
        with failing(everything):
            sampler.sample(PROMPT, 1, PARAMS).result(10)
    everything.show(
        service, training, sampler, service.get_telemetry(), service.holder, training.holder
    )
    everything.show(
        service.holder.config,
        service.holder.transport,
        mask_api_key(KEY),
        sampler.get_sampler_handle(),
    )


def ask(
    client: RestClient | HttpClient,
    server: FaultyServer,
    foreign: FaultyServer,
    everything: Everything,
    echo: Echo,
    answers: list[Answer],
) -> None:
    """Ask by hand: failures, a silence, and a redirect to another's server."""
    away = Answer(302, headers={"Location": f"{foreign.base_url}/away?sig={SIGNED}"})
    for answer in (*answers, away, Answer(200, {}, delay=0.3)):
        server.script("training_runs/run", answer, echo(403))
        foreign.script("/away", echo_of(SIGNED)(403))
        if isinstance(client, RestClient):
            with failing(everything):
                client.get_training_run("run").result(10)
        elif answer.status != 200 or answer.delay or answer.drop:  # by hand, any good answer is one
            with failing(everything):
                client.get("training_runs/run", timeout=0.2, max_retries=0).result(10)
    everything.show(client)


def report(service: ServiceClient, everything: Everything) -> None:
    """Tell the reporter what a careless program would."""
    reporter = service.get_telemetry()
    assert reporter is not None
    for text in (
        KEY,
        f"the key {KEY} is bad",
        f"https://a/?k={quote(KEY)}",
        base64.b64encode(KEY.encode()).decode(),
    ):
        with contextlib.suppress(RuntimeError), telemetry.capture_exceptions(reporter):
            raise RuntimeError(text) from ValueError(text)
        assert reporter.log(text, {"text": text, text: [text]})
    assert reporter.flush(sync=True)


# ── where a key comes from ────────────────────────────────────────────────────────────────────────


def from_argument(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    return ServiceClient(base_url=server.base_url, api_key=KEY)


def from_environment(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    monkeypatch.setenv("TINKER_API_KEY", f" {KEY} ")
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    return ServiceClient()


def from_program(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    tinkex.configure(api_key=KEY, dump_headers=True, user_metadata={"team": "red"})
    return ServiceClient(base_url=server.base_url)


def from_command(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {KEY}")
    return ServiceClient(base_url=server.base_url)


def from_file(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    path = Path("~/.tinker/credentials.json").expanduser()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"default": "a", "keys": {"a": {"key": KEY}}}))
    return ServiceClient()  # of the hosted service, which the server stands for


@pytest.mark.covers("W03", "W04", "C05", "C25", "24.config.6", "1.9/7")
@pytest.mark.parametrize(
    "source", [from_argument, from_environment, from_program, from_command, from_file]
)
def test_key_is_sent_only_to_its_own_server(
    source: Callable[..., ServiceClient],
    own: FaultyServer,
    foreign: FaultyServer,
    everything: Everything,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    echo = echo_of(KEY)
    answers = (
        failures(echo) if source is from_argument else failures(echo)[::5]
    )  # where it comes from is all that differs
    with source(own, monkeypatch) as service:
        use(service, own, everything, echo, answers)
        report(service, everything)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rest = service.create_rest_client()
        ask(rest, own, foreign, everything, echo, answers)
    # it was there, and did its work
    assert {seen.headers.get("x-api-key") for seen in own.seen} == {KEY}
    assert own.requests("telemetry")
    everything.sent(own, own=["x-api-key"])
    everything.sent(foreign)


@pytest.mark.covers("W03")
def test_unusual_key_is_kept_secret_too(own: FaultyServer, everything: Everything) -> None:
    own.script("retrieve_future", Answer(body={"model_id": "s:train:0"}))
    own.script("optim_step", Answer(body={"request_id": "r"}))
    paused = Answer(
        408, {"queue_state": "paused_capacity", "queue_state_reason": f"busy with {GATE}"}
    )
    # any key will do on this machine
    with ServiceClient(base_url=own.base_url, api_key=GATE) as service:
        client = service.create_lora_training_client("m").result()
        for body in (
            {"error": f"for {GATE}"},
            {"error": {"message": quote(GATE), "category": "user"}},
            [GATE],
        ):
            own.script("retrieve_future", paused, Answer(body=body))
            with failing(everything):
                client.optim_step(STEP).result(10)
        own.script("optim_step", Answer(body={"error": f"at once for {GATE}"}), echo_of(GATE)(422))
        for _ in range(2):
            with failing(everything):
                client.optim_step(STEP).result(10)
        everything.show(service, client, service.holder.config)
    everything.sent(own, own=["x-api-key"])


# ── the other secrets ─────────────────────────────────────────────────────────────────────────────

SETTINGS: dict[str, Any] = {
    "api_key": KEY,
    "cf_access_client_id": "id",
    "cf_access_client_secret": GATE,
    "default_headers": {"Authorization": f"Bearer {HEADER}", "X-Team": "red"},
    "default_query": {"access_token": QUERY, "page": "1"},
    "dump_headers": True,
    "timeout": 5,
}
OWN_HEADERS = ("x-api-key", "cf-access-client-secret", "authorization")


@pytest.mark.covers("W03", "W04", "C05", "C25", "24.config.6", "1.9/7")
def test_gates_headers_and_queries_are_seen_by_their_own_server_only(
    own: FaultyServer, foreign: FaultyServer, everything: Everything
) -> None:
    config = Config(base_url=own.base_url, **SETTINGS)
    everything.show(config, *redaction.secrets_of(Config(base_url="http://localhost")))
    tinkex.configure(**SETTINGS)
    with HttpClient(base_url=own.base_url) as http:
        echo = echo_of(KEY, GATE, HEADER, QUERY)
        ask(http, own, foreign, everything, echo, failures(echo))
        for status in (401, 403, 429, 500):
            own.script("events", echo(status))
            with failing(everything):
                list(http.stream_get("events", timeout=5))
    assert own.seen[0].headers["cf-access-client-secret"] == GATE
    assert QUERY in own.seen[0].path
    everything.sent(own, own=OWN_HEADERS)
    everything.sent(foreign)


@pytest.mark.covers("W03", "C04", "C05")
@pytest.mark.parametrize(
    "answer",
    [echo_of(KEY, PASSWORD, GATE)(407), Answer(drop=True), None],
    ids=["refuses", "drops", "is-not-there"],
)
def test_proxys_password_is_seen_by_the_proxy_only(
    own: FaultyServer, everything: Everything, answer: Answer | None
) -> None:
    address = own.base_url if answer is not None else "http://127.0.0.1:1"
    proxy = address.replace("://", f"://someone:{quote(PASSWORD, safe='')}@")
    tinkex.configure(
        proxy=proxy, proxy_headers=(("X-Gate", GATE),), api_key=KEY, patience=0, dump_headers=True
    )
    if answer is not None:
        own.script("training_runs/run", answer)
    with RestClient(base_url="http://tinker.invalid") as rest, failing(everything):
        everything.show(rest)
        rest.get_training_run("run").result(10)
    for seen in own.seen:  # it has come through the proxy: both are for it
        assert seen.headers["x-api-key"] == KEY
    everything.sent(own, own=("x-api-key", "proxy-authorization", "x-gate"))
    with failing(everything, tinkex.ConfigurationError):
        Config(base_url=f"http://someone:{PASSWORD}@127.0.0.1:1", api_key=KEY)


@pytest.mark.covers("W03")
def test_token_of_another_account_stays_secret(own: FaultyServer, everything: Everything) -> None:
    echo = echo_of(KEY, OTHER_KEY)
    with ServiceClient(base_url=own.base_url, api_key=KEY) as service:
        for status in (403, 500):
            for path in ("weights_info", "create_model", "load_weights"):
                own.script(path, echo(status))
            with failing(everything):
                service.create_training_client_from_state(
                    "tinker://run/weights/x", weights_access_token=OTHER_KEY
                ).result()
    own.script("copy_weights", echo(403))
    with RestClient(base_url=own.base_url, api_key=KEY) as rest, failing(everything):
        rest.copy_weights(
            "tinker://run/weights/x", "project", weights_access_token=OTHER_KEY
        ).result(10)
    bodies = b"".join(seen.body for seen in own.seen)
    headers = {
        name for seen in own.seen for name, value in seen.headers.items() if value == OTHER_KEY
    }
    assert headers or OTHER_KEY.encode() in bodies  # it was given to the server that it is for
    own.seen[:] = [seen for seen in own.seen if OTHER_KEY.encode() not in seen.body]
    everything.sent(own, own=("x-api-key", *headers))


# ── the hub, and signed addresses ─────────────────────────────────────────────────────────────────


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("hub.TOKEN", HF)
    with hub_server() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


@pytest.mark.covers("1.2.3/19", "W03")
def test_hub_token_and_signed_addresses_stay_secret(
    hub: Hub,
    foreign: FaultyServer,
    everything: Everything,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", HF)
    importlib.import_module("huggingface_hub.utils.logging")  # it sets its own level the first time
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    with (
        serving(FakeEngine(), tmp_path / "data", api_key=KEY) as url,
        ServiceClient(base_url=url, api_key=KEY) as service,
    ):
        client = service.create_lora_training_client("fake", rank=4).result()
        path = client.save_weights_for_sampler("final").result(20).path
        [directory] = (tmp_path / "data" / "checkpoints").glob("*/sampler_weights/final")
        (directory / "adapter_config.json").write_text('{"r": 4}')
        (directory / "adapter_model.safetensors").write_bytes(b"w" * 5000)
        rest = RestClient(base_url=url, api_key=KEY)
        hub.signature = f"?X-Amz-Signature={SIGNED}"
        everything.show(push_checkpoint_adapter(rest, path, repo_id="a", hf_token=HF))
        for part in ("whoami", "/commit/", "/lfs/", "resolve", "branch"):
            hub.lfs.clear()
            hub.refuse, hub.words = {part: 403}, f"not with {HF}"
            with failing(everything):
                push_checkpoint_adapter(rest, path, repo_id="a", revision="v1", hf_token=HF)
        rest.close().result(10)
    everything.note("the hub's files", *(str(files) for files in hub.repos.values()))
    with faulty_server() as files:
        files.script(
            "/m/resolve/main/f",
            Answer(302, headers={"Location": f"{foreign.base_url}/f?sig={SIGNED}"}),
        )
        echo = echo_of(HF)
        foreign.script("/f", echo(403))
        for answer in (None, echo(401), echo(500)):
            if answer is not None:
                files.script("/m/resolve/main/f", answer)
            with failing(everything):
                resolve_file(
                    "m", "main", "f", cache_dir=tmp_path / "cache", endpoint=files.base_url
                )
        assert {seen.headers["authorization"] for seen in files.seen} == {f"Bearer {HF}"}
        everything.sent(files, own=["authorization"])
    for seen in foreign.seen:
        assert "authorization" not in seen.headers
    everything.read(tmp_path)


@pytest.mark.covers("W03", "W04")
def test_signed_address_is_secret_and_needs_no_key(
    own: FaultyServer, foreign: FaultyServer, everything: Everything, tmp_path: Path
) -> None:
    archive = "training_runs/run/checkpoints/weights/x/archive"
    signed = f"{foreign.base_url}/files/a.tar?X-Amz-Signature={SIGNED}&token={SIGNED}"
    own.script(archive, Answer(302, headers={"Location": signed}))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    with RestClient(base_url=own.base_url, api_key=KEY) as rest:
        cut = Answer(200, packed.getvalue(), {"ETag": '"1"'}, cut=100)
        echo, again = echo_of(SIGNED), Answer(302, headers={"Location": signed})
        for answer in (echo(403), echo(404), echo(500), Answer(drop=True), cut, again):
            foreign.script("/files/a.tar", answer)
            with failing(everything):
                downloads.download(rest, "tinker://run/weights/x", tmp_path / "out", resume=True)
        foreign.script("/files/a.tar", Answer(200, packed.getvalue()))
        everything.show(
            downloads.download(rest, "tinker://run/weights/x", tmp_path / "out", resume=True)
        )
    everything.sent(own, own=["x-api-key"])
    assert all(SIGNED in seen.path for seen in foreign.seen)  # that much is for it
    everything.sent(foreign)
    everything.read(tmp_path)


# ── the server ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W03")
@pytest.mark.parametrize("tokens", [False, True])
def test_server_keeps_and_tells_no_key(
    everything: Everything, tmp_path: Path, tokens: bool
) -> None:
    data = tmp_path / "data"
    with serving(FakeEngine(), data, api_key=KEY, tokens=tokens) as url:
        with ServiceClient(base_url=url, api_key=KEY) as service:
            client = service.create_lora_training_client("fake", rank=4).result()
            client.forward_backward(DATA, "cross_entropy")
            client.optim_step(STEP)
            path = client.save_state("s").result(20).path
            client.load_state(path, weights_access_token=OTHER_KEY).exception(20)
            client.save_weights_and_get_sampling_client().result().sample(PROMPT, 1, PARAMS).result(
                20
            )
            policy = RecoveryPolicy(
                enabled=True, max_attempts=1, checkpoint_strategy=("specific", path)
            )
            executor = Executor(2)
            executor.recover(client.model_id, service, policy)
            executor.recover(
                "lost", service, RecoveryPolicy(enabled=True, max_attempts=1, backoff_ms=1)
            )
            until(lambda: not executor.pending)
            everything.show(service, client)
        wire = Keyed(url, KEY)
        model = wire.model()
        for body in (pass_json(model, 1), sample_json(model), step_json(model, 1)):
            everything.note("an answer", wire.send("forward_backward", body).body.decode("latin-1"))
        for key in (OTHER_KEY, f"Bearer {KEY}", KEY[:-1]):
            answer = Wire(url).send(
                "get_server_capabilities",
                method="GET",
                headers={"X-API-Key": key, "Authorization": f"Bearer {KEY}"},
            )
            everything.note("a refusal", answer.body.decode(), repr(answer.headers))
        for place in ("/metrics", "/openapi.json", "/api/v1/nothing"):
            answer = wire.send(place, method="GET")
            everything.note(
                f"the answer of {place}", answer.body.decode("latin-1"), repr(answer.headers)
            )
    everything.read(data)


def test_keys_that_are_made_are_kept_as_hashes(everything: Everything, tmp_path: Path) -> None:
    with contextlib.closing(SqliteDatabase(tmp_path)) as store:
        _, key = create_key(store, "laptop")
    NEEDLES[key] = forms(key)
    try:
        with (
            serving(FakeEngine(), tmp_path) as url,
            ServiceClient(base_url=url, api_key=key) as service,
        ):
            service.create_lora_training_client("fake", rank=4).result().save_state("s").result(20)
            everything.show(service)
        everything.read(tmp_path)
        everything.check()
    finally:
        del NEEDLES[key]


# ── the judge ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("secret", SECRETS)
def test_every_form_of_a_secret_is_found_and_a_mask_is_not(secret: str) -> None:
    for written in (
        secret,
        quote(secret, safe=""),
        secret.upper(),
        f"…{secret[6:-4]}…",
        secret.encode().hex(),
    ):
        assert leaks(f"a {written} b")
    for before in range(3):
        assert leaks(base64.b64encode(b"x" * before + secret.encode() + b"more").decode())
    assert leaks(mask_api_key(secret) or "") == []


def test_breaking_the_redaction_is_noticed(
    own: FaultyServer,
    foreign: FaultyServer,
    everything: Everything,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for method in ("text", "without_keys"):
        monkeypatch.setattr(redaction.Scrubber, method, lambda self, value, *_, **__: value)
    with ServiceClient(base_url=own.base_url, api_key=KEY) as service:
        own.script("create_session", echo_of(KEY)(401))
        with failing(everything):
            service.create_lora_training_client("m").result()
    with pytest.raises(AssertionError, match=f"{KEY[:6]}…"):
        everything.check()
    everything.parts[:] = [("nothing", "")] * 21
