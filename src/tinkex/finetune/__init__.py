"""Supervised fine-tuning: files of examples, a plan of steps, and a loop that can be resumed.

    examples, bad = read_examples("examples.jsonl")
    rendered, refused = render(examples, ChatFormat(client.get_tokenizer()))
    rows = fit(rendered, 4096).rendered
    plan = Plan(examples=len(rows), steps=100)
    FineTune(client, plan, rows, RunFolder.create("run", {}, {})).run()

A step's number decides everything it does, so a run that resumes from a checkpoint gives what it
would have given without the break. `tinkex train` is this with options.
"""

from __future__ import annotations

from tinkex.finetune.example_files import (
    BadLine as BadLine,
    Example as Example,
    Fitted as Fitted,
    digest as digest,
    fit as fit,
    hold_out as hold_out,
    read_examples as read_examples,
    render as render,
    without_answer as without_answer,
)
from tinkex.finetune.loop import (
    FineTune as FineTune,
    Plan as Plan,
    Progress as Progress,
    is_full as is_full,
    is_lost as is_lost,
)
from tinkex.finetune.run_folder import (
    RunFolder as RunFolder,
)
