"""Second opinions kept beside a family's tiny model.

    python -m bench.families.kept [--variants bfloat16,decode] [FAMILY ...]

It makes the models and their opinions in build/families, with no engine of vLLM's. That folder can
then be carried to a GPU host, whose time is short and whose transformers may know fewer families:
there the model is as carried, and nothing is asked again.
"""

import argparse
import time

from bench.families import against_oracle, look, make


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=make.families())
    parser.add_argument("--variants", default="bfloat16,decode")
    options = parser.parse_args()
    for family in options.families:
        for variant in options.variants.split(","):
            began = time.monotonic()
            try:
                if variant == "decode":
                    against_oracle.opinions(family, str(against_oracle.model(family, look.FOLDER)))
                else:
                    look.artifacts(look.options_of(family, variant, on_gpu=True), family)
                word = "kept"
            except Exception as error:  # a model that this transformers does not know
                word = f"none ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            print(f"{family:14} {variant:9} {word}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
