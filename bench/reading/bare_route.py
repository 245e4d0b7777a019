"""What the pollers are compared with: a FastAPI route, without Redis, checks or middleware."""

from fastapi import FastAPI

from poc_core.answers import Progress

app = FastAPI()


@app.get("/{request_id}")
async def read(request_id: str) -> Progress:
    return Progress(
        status="running",
        request_id=request_id,
        model="tiny-qwen3",
        n_total=1000,
        n_done=0,
        created_at=1764000000.5,
    )
