"""Llama 2, 3, 3.1 and 3.2 (text), SmolLM2, and the bundled `tinkex/tiny`."""

from __future__ import annotations

from typing import ClassVar

from tinkex.engine.families.family import Family

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    # of the four frequencies one is kept, one interpolated, two are divided
    "low_freq_factor": 0.1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Llama(Family):
    """Full attention in every layer."""

    name = "llama"
    tiny: ClassVar = {
        "llama2": {"num_key_value_heads": 4},
        "llama3": {"rope_parameters": LLAMA3},
        "llama-bias": {"attention_bias": True, "mlp_bias": True},
        "smollm2": {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    }


FAMILY = Llama()
