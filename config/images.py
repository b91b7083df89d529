"""Settings of images in prompts."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, ClassVar

from .base import PositiveInt, Range, Seconds, Section

RGB_BYTES = 3
"""Bytes of a decoded pixel."""

_HOST = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")


class ImagesConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Images in prompts. docs/images.md.

    Attributes:
        max_per_request: Limit on the images of one request.
        max_bytes: Size limit of an image's file.
        max_pixels: Limit on its width times its height, also while it is processed.
        max_side: Limit on its width, and on its height, in pixels, likewise.
        decoders: Processes that decode images, one at a time each. One more serves a tenant none
            of whose images is being decoded.
        decode_timeout_s: CPU time limit for decoding and processing one image.
        store_bytes: Memory for images as the model's vision part takes them, in this process or on
            Redis: those of requests in flight, of one tenant at most half, and earlier ones until
            others need the room.
        url_hosts: Hosts from which the gateway fetches images that a request names by URL:
            "images.example.org", "*.example.org" for all below, "*" for any. Empty: no URL is
            fetched.
        url_networks: Networks, as "10.1.0.0/16", whose addresses may be fetched from although they
            are not public.
        url_ports: Ports of these URLs.
        url_redirects: Redirects that are followed, each checked like the URL itself.
        url_timeout_s: Time limit for fetching one image, redirects included.
    """

    SECTION: ClassVar[str] = "images"

    max_per_request: PositiveInt = 32
    max_bytes: PositiveInt = 16 << 20
    max_pixels: PositiveInt = 40_000_000
    max_side: Annotated[int, Range("from 1 to 65535", 1, 65_535)] = 16_384
    decoders: Annotated[int, Range("from 1 to 64", 1, 64)] = 2
    decode_timeout_s: Seconds = 10.0
    store_bytes: PositiveInt = 1 << 30
    url_hosts: tuple[str, ...] = ()
    url_networks: tuple[str, ...] = ()
    url_ports: tuple[int, ...] = (80, 443)
    url_redirects: Annotated[int, Range("from 0 to 20", 0, 20)] = 3
    url_timeout_s: Seconds = 10.0

    def check(self) -> None:
        self.require(
            "store_bytes",
            self.store_bytes >= RGB_BYTES * self.max_pixels,
            f"at least {RGB_BYTES} times images.max_pixels, or large images would not fit",
        )
        check_urls(self, "url")


def check_urls(section: Section, name: str) -> None:
    """Check the settings of URLs that clients give: hosts, networks and ports.

    Raises:
        ConfigError: One is none.
    """
    hosts, networks, ports = (
        getattr(section, f"{name}_{each}") for each in ("hosts", "networks", "ports")
    )
    form = "names of hosts, such as images.example.org or *.example.org, without scheme and port"
    section.require(f"{name}_hosts", all(map(_HOST.fullmatch, hosts)), form)
    section.require(
        f"{name}_networks", all(map(_is_network, networks)), "networks such as 10.1.0.0/16"
    )
    section.require(f"{name}_ports", all(0 < p < 65_536 for p in ports), "ports from 1 to 65535")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
