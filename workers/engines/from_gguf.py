"""Converts a GGUF file's model and tokenizer to a folder that engines can load.

python -m workers.engines.from_gguf FILE FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main(file: Path, folder: Path) -> None:
    """Loads the model and tokenizer from a GGUF file, and saves them in `folder` in bfloat16."""
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
