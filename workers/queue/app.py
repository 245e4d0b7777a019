"""The Celery application of workers and of Flower, for `celery -A workers.queue.app`."""

from celery import Celery

from poc_core import queues
from poc_core.settings import load_settings
from workers.queue.broker import SteadyAMQP


def create_app(redis_url: str | None = None, consumer: queues.Consumer = "monitor") -> Celery:
    """Creates a Celery application. `redis_url`: the broker; None means the settings' Redis."""
    app = Celery("proofline", amqp=SteadyAMQP, include=["workers.tasks"])
    app.conf.update(queues.celery_config(load_settings(redis_url=redis_url), consumer))
    # Without Celery's built-in tasks, messages can only run the tasks of workers.tasks.
    for name in [one for one in app.tasks if one.startswith("celery.")]:
        del app.tasks[name]
    return app


app = create_app()
