"""What determines a distance beside hash, key and seq_len."""

from typing import Literal

from pydantic import Field

from poc_core.schemes.contract import Options

Randomization = Literal["sign_flips", "layer_hooks"]


class DistanceOptions(Options):
    randomization: Randomization = Field("sign_flips", description="sign_flips or layer_hooks")
