"""/api/v1/gpu: the node's GPUs as reported by NVML. The paths are those of MLNode."""

from functools import partial

from fastapi import APIRouter
from pydantic import BaseModel

from api.routes import examples
from api.routes.services import AppServices
from poc_core.gpus import Gpu, GpuDriver, GpuWatch, MachineGpus
from poc_core.state.parsing import readable
from poc_core.state.registry import WorkerRegistry

router = APIRouter(prefix="/api/v1/gpu", tags=["GPU"], responses=examples.REDIS_AWAY)


class Gpus(BaseModel):
    devices: list[Gpu]
    count: int


@router.get("/devices", summary="List the node's GPUs")
def devices(services: AppServices) -> Gpus:
    """Lists each GPU once: first the GPUs of the API's machine, then those of other machines.

    `index` is the GPU's position in this list. The list is empty if there is no GPU.
    """
    found: dict[str, Gpu] = {}
    for machine in _machines(services.gpus, services.workers):
        for gpu in machine.devices:
            found.setdefault(gpu.uuid, gpu)
    numbered = [gpu.model_copy(update={"index": index}) for index, gpu in enumerate(found.values())]
    return Gpus(devices=numbered, count=len(numbered))


@router.get("/driver", summary="Show the versions of the GPU driver")
def driver(services: AppServices) -> GpuDriver:
    """Returns the driver of the API's machine, or of the first host that has one; else null."""
    return next(
        (
            machine.driver
            for machine in _machines(services.gpus, services.workers)
            if machine.driver is not None
        ),
        GpuDriver(),
    )


def _machines(gpus: GpuWatch, workers: WorkerRegistry) -> list[MachineGpus]:
    found = [gpus.now()]
    for worker in workers.live():
        parse = partial(MachineGpus.model_validate, worker.gpus)
        if (told := readable(f"GPUs of worker {worker.id!r}", parse)) is not None:
            found.append(told)
    return found
