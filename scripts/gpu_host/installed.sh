# On the GPU host, after unpack.sh: a command `proofline` as of an installed package, for services
# that start with an environment of their own.   source installed.sh
_bin=$(mktemp -d)
{
    echo '#!/bin/bash'
    export -p | grep -E ' (PYTHONPATH|VLLM_\w+|HF_HUB_OFFLINE|PROOFLINE_ROW)='
    echo "exec $(command -v python3) -m cli.main \"\$@\""
} > "$_bin/proofline"
chmod +x "$_bin/proofline"
export PATH=$_bin:$PATH
