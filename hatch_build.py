"""Puts the example pictures into the wheel, beside the page that offers them.

An editable install reads them where they are: ``examples/`` of the checkout.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExamplesHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["examples"] = "sam3_ray/serve/web/examples"
