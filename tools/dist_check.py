"""Builds the wheel and the sdist, installs them into empty environments, and tries them.

Run `python tools/dist_check.py`. The client alone is tried first (it must bring no torch and no
server), from the wheel and from the sdist; then the wheel with its `local` extra samples from the
bundled model.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CLIENT = """
import importlib.util, tinkex
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("starlette") is None
try:
    tinkex.ServiceClient()
except tinkex.ConfigurationError as error:
    assert "TINKER_API_KEY" in str(error) and "local" in str(error)
else:
    raise SystemExit("a client without a key and without an address was made")
try:
    tinkex.ServiceClient(base_url="local").create_sampling_client(base_model="tinkex/tiny").result()
except tinkex.ConfigurationError as error:
    assert "tinkex[local]" in str(error)
print("client", tinkex.__version__, "works alone")
"""

LOCAL = """
import tinkex
with tinkex.ServiceClient(base_url="local") as service:
    sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
    tokenizer = sampler.get_tokenizer()
    prompt = tinkex.ModelInput.from_ints(tokenizer.encode("Once upon a time"))
    sampled = sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=8, temperature=0)).result()
    print("the bundled model says:", tokenizer.decode(sampled.sequences[0].tokens))
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command away from the user's own settings and caches; its failure ends the program."""
    print(
        "$",
        *(
            word.name if isinstance(word, Path) else word
            for word in command
            if "\n" not in str(word)
        ),
        flush=True,
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TINKER_", "TINKEX_"))
    }
    if cwd is not None:
        clean |= {"TINKEX_DATA_DIR": str(cwd / "data"), "HF_HOME": str(cwd / "hf")}
    subprocess.run([str(word) for word in command], check=True, cwd=cwd, env=clean)


def environment(place: Path, package: str) -> Path:
    """An empty environment with one package in it; its Python."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-qq",
        "-c",
        constraints,
        package,
    )
    return python


def main() -> None:
    """Build, install, try."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        builder = environment(place / "builder", "build")
        run(builder, "-m", "build", "--outdir", place / "dist", ROOT)
        wheel, sdist = next((place / "dist").glob("*.whl")), next((place / "dist").glob("*.tar.gz"))
        for file in (wheel, sdist):
            print(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB")
        for name, package in (("wheel", wheel), ("sdist", sdist)):
            python = environment(place / name, str(package))
            run(python, "-c", CLIENT, cwd=place)
            run(python.with_name("tinkex"), "--version", cwd=place)
        python = environment(place / "local", f"{wheel}[local]")
        run(python, "-c", LOCAL, cwd=place)


if __name__ == "__main__":
    main()
