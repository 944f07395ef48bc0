"""The application: ``serve_config.yaml`` names ``build_app``.

No ``from __future__ import annotations`` here: Ray reads the builder's annotation to validate the arguments,
and would take a string for "no model".
"""

import logging

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from sam3_ray import chips
from sam3_ray.serve.config import (
    IngressSettings,
    ReplicaSettings,
    ServeConfig,
    live_settings,
)
from sam3_ray.serve.hosts import check_hosts
from sam3_ray.serve.ingress import Ingress
from sam3_ray.serve.plan import REPLICA_DEPLOYMENT, Cluster, Plan, resolve
from sam3_ray.serve.replica import Sam3Replica

logger = logging.getLogger("sam3_ray")

APP_NAME = "sam3"
INGRESS_REQUESTS = 10_000
"""Requests that the ingress has at a time, most of them waiting for their clients."""

ROUTER = "sam3_ray.serve.router.DigestRouter"


def build_app(config: ServeConfig) -> Application:
    """The Serve application of a configuration: an ingress, and a replica for each chip (or one CPU).

    Args:
        config: the ``args`` of the application in the configuration file.

    Raises:
        ServeConfigError: what is asked does not fit the Ray cluster.
        WeightsNotFoundError, WeightsAccessError: weights that are required are not to be had.
    """
    plan = resolve(config, Cluster.of_ray())
    if plan.chips_per_replica:
        check_hosts()
    logger.info("serving %s on %d x %s", plan.checkpoint.label, plan.replicas, plan.backend)
    return deployments(config, plan)


def __getattr__(name: str) -> Application:
    """``application``, for ``serve build``, which takes no builder: the default configuration's, for the Ray
    that this process is connected to, else for this machine."""
    if name == "application":
        config = ServeConfig()
        if ray.is_initialized():
            return build_app(config)
        here = Cluster.of_this_machine(len(chips.look().visible()))
        return deployments(config, resolve(config, here))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def deployments(config: ServeConfig, plan: Plan) -> Application:
    """The deployments of a plan."""
    resources = {chips.RAY_RESOURCE: plan.chips_per_replica} if plan.chips_per_replica else {}
    replicas = serve.deployment(
        name=REPLICA_DEPLOYMENT,
        num_replicas=plan.replicas,
        ray_actor_options={"num_cpus": plan.num_cpus, "resources": resources},
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        # Here, not in the constructor, so that a changed value restarts nothing.
        user_config=live_settings(ReplicaSettings, config, {}).model_dump(),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,  # type: ignore[arg-type]  # Ray's stub knows no import path
            request_router_kwargs={
                "num_fallbacks": config.num_fallbacks,
                "load_factor": config.load_factor,
                "free_load": 2 * config.max_batch_size,
            },
        ),
        # A new replica cannot have the chip that the old one still holds.
        max_surge_percent=0,
        # What a constructor can find wrong was checked before: a few tries are for a flaky disk.
        max_constructor_retry_count=3,
    )(Sam3Replica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1,
        # It only forwards bytes; with a CPU of its own it would not fit on a machine with one.
        ray_actor_options={"num_cpus": 0},
        # Far more than the replicas take: a request whose body comes slowly holds nobody's place, and what
        # the proxy turns away gets plain text, not a problem. Bodies are bounded by UploadSpace, work by the
        # replicas' own numbers.
        max_ongoing_requests=INGRESS_REQUESTS,
        user_config=live_settings(IngressSettings, config, {}).model_dump(),
    )(serve.ingress()(Ingress))
    application: Application = ingress.bind(replicas.bind(config, plan), config, plan)
    return application
