"""A file in a form: what becomes of its fields and its bytes, and how it is sent.

Run it:  python examples/file_upload_multipart.py      (needs no server) Settings:
TINKER_UPLOAD_FILE (examples/assets/sample_upload.bin by default), TINKER_UPLOAD_NOTE,
TINKER_UPLOAD_ENDPOINT (a path to post the form to; the Tinker API has none); where to: see
common.py.
"""

import re
from pathlib import Path

import common

from tinkex import HttpClient
from tinkex.client.http import multipart
from tinkex.wire.json_values import transform

FILE = Path(common.text("TINKER_UPLOAD_FILE", str(common.ASSETS / "sample_upload.bin")))
NOTE = common.text("TINKER_UPLOAD_NOTE", "an upload from the examples")
ENDPOINT = common.text("TINKER_UPLOAD_ENDPOINT")


def main() -> None:
    """Six sections, from a file to a request."""
    common.section("1. The file")
    if not FILE.is_file():
        common.fail(f"there is no file {FILE}")
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")

    common.section("2. Transform: plain data, as JSON would have it")
    fields = transform(
        {"note": NOTE, "meta": {"source": "example", "tags": ["a", "b"]}, "public": False}
    )
    print(fields)

    common.section("3. Flatten: nested fields get bracketed names")
    content_type, body = multipart.multipart(fields, {"file": FILE})
    names = re.findall(rb'form-data; name="([^"]+)"', body)
    print(", ".join(name.decode() for name in names))
    common.proof(
        {b"note", b"meta[source]", b"meta[tags][]", b"file"} <= set(names),
        "all fields and the file are there",
    )

    common.section("4. Encode")
    boundary = content_type.partition("boundary=")[2]
    print(f"{content_type}\n{len(body)} bytes")
    common.proof(
        f'filename="{FILE.name}"'.encode() in body, f"the file keeps its name: {FILE.name}"
    )
    common.proof(FILE.read_bytes() in body, "its bytes are in it, unchanged")
    common.proof(
        body.endswith(f"--{boundary}--\r\n".encode()), "the form ends with the closing boundary"
    )

    common.section("5. The first 500 bytes")
    print(body[:500].decode(errors="replace").replace("\r\n", "\n"))

    common.section("6. Send")
    if not ENDPOINT:
        print("no endpoint: set TINKER_UPLOAD_ENDPOINT to post the form there")
        return
    with HttpClient(base_url=common.BASE_URL) as http:
        answer = http.post(ENDPOINT, fields, files={"file": FILE}, response="wrapped").result()
    print(f"POST {ENDPOINT} -> {answer.status_code}")
    common.proof(answer.status_code < 300, "the server took it")


if __name__ == "__main__":
    common.run(main)
