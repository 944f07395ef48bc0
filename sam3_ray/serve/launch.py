"""Starts a Ray of its own on this machine, deploys a checked configuration, and stops all of it again.

It never joins or stops another Ray: what it stops is what it started. That Ray listens on the loopback only,
whatever address Serve's HTTP proxy listens on: one machine needs no more.
"""

from __future__ import annotations

import logging
import os
import shutil
import ssl
import time
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from sam3_ray import chips
from sam3_ray.local_ray import StartedProcesses, adopt_orphans
from sam3_ray.ray_messages import cause_of, one_line
from sam3_ray.serve import proxies
from sam3_ray.serve.preflight import Launch

POLL_S = 0.2
STILL_STARTING_S = 30.0
DRAIN_S = 8.0
"""How long replicas may take to end what they do, and to give their chips back, when asked to stop."""


class LaunchError(Exception):
    """It did not start, or ended by itself. The message is for a person."""


class LocalService:
    """One Ray and the application in it. Call ``local_ray.keep_ray_on_loopback`` first.

    Args:
        launch: what to start.
        proxy: which of Serve's proxies stands in front.
        verbose: leave Ray's and Serve's messages on the console.
        dashboard: also start Ray's dashboard.
        metrics_port: where Prometheus finds the metrics; None: any free port.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        proxy: proxies.ProxyMode = "plain",
        verbose: bool = False,
        dashboard: bool = False,
        metrics_port: int | None = None,
    ) -> None:
        self._launch = launch
        self._proxy = proxy
        self._proxy_folder: Path | None = None
        self._verbose = verbose
        self._dashboard = dashboard
        self._metrics_port = metrics_port
        self._deployed = False
        self._processes = StartedProcesses()
        self._essential: list[psutil.Process] = []
        self.log_folder: str | None = None
        """Where Ray and Serve write their logs, once Ray runs."""

        self.metrics_url: str | None = None
        """What Prometheus scrapes, once Ray runs; None where Ray says nothing of it."""

    def start(self, report: Callable[[str], None]) -> None:
        """Start Ray, deploy, and wait until a request would be answered.

        Args:
            report: told, now and then, what it is waiting for.

        Raises:
            LaunchError: with the cause.
        """
        adopt_orphans()
        self._processes = StartedProcesses()
        _prepare_environment(self._launch)
        self._prepare_proxy()
        if not self._verbose:
            _quiet_logging()
        for last in (False, True):
            try:
                self._start_ray()
                break
            except Exception as error:  # Ray raises a bare Exception, among others
                self._end_processes()
                # Ray gives itself 30 s, which a machine that is busy with other things can miss.
                if last or "timed out during startup" not in str(error):
                    raise LaunchError(f"Ray did not start: {one_line(str(error))}") from error
                report("Ray did not start within its 30 s; trying once more")
        self._essential = [
            process for process in self._processes() if _name(process) in ("gcs_server", "raylet")
        ]
        self.log_folder = _log_folder()
        self.metrics_url = _metrics_url()
        self._deploy()
        self._wait_until_running(report)
        self._wait_until_answering()

    def _prepare_proxy(self) -> None:
        self._proxy_folder = proxies.make_folder()
        largest = proxies.largest_message(self._launch.max_upload_bytes)
        try:
            os.environ.update(
                proxies.environment(self._proxy, self._proxy_folder, largest_bytes=largest)
            )
        except (proxies.ProxyError, OSError) as error:
            raise LaunchError(str(error)) from error

    def _start_ray(self) -> None:
        import ray

        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=self._dashboard,
            resources={"TTNPU": len(self._launch.machine_chips)}
            if self._launch.machine_chips
            else None,
            _metrics_export_port=self._metrics_port,
            log_to_driver=self._verbose,
            logging_level=logging.INFO if self._verbose else logging.ERROR,
        )

    def _deploy(self) -> None:
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(self._launch.values)
        try:
            serve.start(
                proxy_location=schema.proxy_location,
                http_options=schema.http_options.model_dump(),
                grpc_options=schema.grpc_options.model_dump(),
                logging_config=schema.logging_config,
                controller_options=schema.controller_options,
            )
            # What `serve run CONFIG` does; serve.run takes an application, not a configuration.
            client = _get_global_client()
            assert client is not None  # or it would have raised
            client.deploy_apps(schema)
        except Exception as error:
            raise LaunchError(f"Serve did not start: {cause_of(str(error))}") from error
        self._deployed = True

    def _wait_until_running(self, report: Callable[[str], None]) -> None:
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        next_report = time.monotonic() + STILL_STARTING_S
        while True:
            self.check_alive()
            application = serve.status().applications.get(self._launch.application)
            if application is not None:
                status = application.status
                if status == ApplicationStatus.RUNNING:
                    return
                if status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                    messages = [one.message for one in application.deployments.values()]
                    raise LaunchError(
                        "the service did not start: "
                        + cause_of("\n".join([application.message, *messages]))
                    )
            if time.monotonic() > next_report:
                next_report += STILL_STARTING_S
                report(_waiting_for(application))
            time.sleep(POLL_S)

    def _wait_until_answering(self) -> None:
        deadline = time.monotonic() + 60.0
        url = f"{self._launch.url}/health"
        # The certificate may be made for another name, and by an authority that is not known here.
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
        )
        last = ""
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                with opener.open(url, timeout=10) as response:
                    if response.status == HTTPStatus.OK:
                        return
                    last = f"{response.status}"
            except OSError as error:  # URLError and HTTPError are OSErrors
                last = str(error)
            time.sleep(POLL_S)
        raise LaunchError(f"the service is running, but {url} does not answer well: {last}")

    def check_alive(self) -> None:
        """Look whether Ray's own processes are still there.

        Raises:
            LaunchError: one has ended.
        """
        for process in self._essential:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise LaunchError(f"Ray's {_name(process)} (pid {process.pid}) has ended")

    def trouble(self) -> str | None:
        """Why the application is unhealthy; None where it is well."""
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        application = serve.status().applications.get(self._launch.application)
        if application is None:
            return "the application was deleted"
        if application.status == ApplicationStatus.RUNNING:
            return None
        messages = [application.message, *(one.message for one in application.deployments.values())]
        return cause_of("\n".join(messages)) or str(application.status.value)

    def stop(self) -> None:
        """End the application, Ray, and every process that it started; safe to call more than once.

        An interrupt while it runs ends the waiting, not the clean-up.
        """
        import ray

        try:
            if self._deployed and ray.is_initialized():
                self._deployed = False
                self.check_alive()
                self._drain()
        except (KeyboardInterrupt, LaunchError, ray.exceptions.RayError):
            pass  # all that is left to do is to end the processes
        self._end_processes()

    def _end_processes(self) -> None:
        import ray

        self._processes.end(ray.shutdown)
        if self._proxy_folder is not None:
            shutil.rmtree(self._proxy_folder, ignore_errors=True)

    def _drain(self) -> None:
        from ray import serve

        serve.delete(self._launch.application, _blocking=False)
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            if self._launch.application not in serve.status().applications:
                return
            time.sleep(POLL_S)


def _prepare_environment(launch: Launch) -> None:
    """What a configuration file cannot carry; read when Ray and Serve are imported or started."""
    # An address of another Ray must not be joined by anything that starts here.
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        os.environ.pop(name, None)
    if launch.machine_chips:
        os.environ[chips.VISIBLE_DEVICES] = chips.visible_devices_value(launch.machine_chips)
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A constructor that fails has a cause that stays: say it at once, not after three tries.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
        # Ray warns of a change of this default to 0 at every start.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }.items():
        os.environ.setdefault(name, value)


def _quiet_logging() -> None:
    for name in ("ray", "ray.serve", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _log_folder() -> str | None:
    from ray._private.worker import _global_node

    return None if _global_node is None else str(_global_node.get_logs_dir_path())


def _metrics_url() -> str | None:
    """Of this node's agent, which gathers the metrics of every replica on it."""
    import ray

    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and node.get("MetricsExportPort"):
            host = node["NodeManagerAddress"]
            host = f"[{host}]" if ":" in host else host
            return f"http://{host}:{node['MetricsExportPort']}/metrics"
    return None


def _waiting_for(application: Any) -> str:
    if application is None:
        return "Serve has not taken the application yet"
    waiting = [
        f"{name}: {one_line(one.message) or one.status.value}"
        for name, one in application.deployments.items()
        if one.status.value != "HEALTHY"
    ]
    return "; ".join(waiting) or one_line(application.message) or str(application.status.value)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return "process"
