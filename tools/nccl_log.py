#!/usr/bin/env python3
"""Which network NCCL really used, and why not another: read from NCCL's own debug text.

    python tools/nccl_log.py logs/run/           # every file of a folder
    python tools/nccl_log.py --json node0.log    # one JSON object

The text is what NCCL writes with NCCL_DEBUG=INFO, to NCCL_DEBUG_FILE or into a job's log, of any
program, NCCL 2.3 to 2.31 or RCCL. Lines may carry any prefix, be torn, joined or interleaved.
What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. `Assigned NET plugin X to comm`, `Initialized NET plugin X`, where the text ends before 2
  4. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints of networks is a wish, a possibility or start-up traffic.

Exit code: 0 decided; 1 NCCL's text decides nothing; 2 no such file, or no text of NCCL in it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"
LINE_LIMIT = 1 << 20  # characters read at once, so that a file without line ends fits into memory
MESSAGE_LIMIT = 4096  # NCCL's own limit was 1,023 to 2.28.9; the longest lists have some 2,000
QUOTE_LIMIT = 300  # characters of a line that a finding quotes

# --- what NCCL prints --------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A message as the source has it, and the first and last release that print it.

    `last` is empty where the newest release looked at, 2.30.7, still does. `by` names another
    author than NCCL: torch, a network plugin, or RCCL.
    """

    text: str
    first: str
    last: str
    by: str = "NCCL"


@dataclass(frozen=True)
class Rule:
    """A message that says something: `literal` finds its lines fast, `pattern` takes it apart.

    A rule with a problem notes it; any other has a method `on_NAME` in `Reader`.
    """

    name: str
    literal: str
    pattern: re.Pattern
    formats: tuple[Format, ...]
    problem: str = ""


def rule(name: str, literal: str, pattern: str, formats: str, problem: str = "") -> Rule:
    """Each line of `formats`: first release, last release or -, C format; or author, -, format."""
    found = []
    for line in formats.strip().splitlines():
        first, last, text = line.split(maxsplit=2)
        by = "NCCL" if first[0].isdigit() else first
        found.append(Format(text, "" if by != "NCCL" else first, last.strip("-"), by))
    return Rule(name, literal, re.compile(pattern), tuple(found), problem)


NAMES = "NCCL_IB_HCA|NCCL_IB_DISABLE|NCCL_NET_PLUGIN|NCCL_NET"
RULES = (
    rule(
        "version",
        "CCL version",
        # Not in "was compiled with NCCL version", "library version" or "version mismatch".
        r"(?<!with N)CCL version(?: :)? (\d+\.\d+\.\d+\w*)((?:\+(?:cuda|hip)\d+(?:\.\d+)+)?)"
        r"(?=[\s,;:)-]|$)",
        """
        2.3.5 - NCCL version %d.%d.%d+cuda%d.%d
        RCCL  - RCCL version 2.18.3+hip6.0
        RCCL  - RCCL version : 2.30.4-HEAD:0123abc
        torch - unhandled system error, NCCL version 2.14.3
        """,
    ),
    rule(
        "nodes",
        " nNodes ",
        r"rank \d+ nRanks \d+ nNodes (\d+) localRanks",
        "2.20.3 - comm %p rank %d nRanks %d nNodes %d localRanks %d localRank %d MNNVL %d",
    ),
    rule(
        "network_channel",
        "via NET/",
        r"via NET/([^/]+)/(\d+)",  # the name of a network may hold spaces
        """
        2.3.5  2.3.7  Ring %02d : %d -> %d via NET/%s/%d%s%s
        2.4.2  2.4.8  Ring %02d : %d -> %d [send] via NET/%s/%d%s
        2.4.2  2.4.8  Ring %02d : %d -> %d [receive] via NET/%s/%d%s
        2.5.6  2.6.4  Ring %02d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s
        2.5.6  2.6.4  Ring %02d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s
        2.7.3  2.7.8  Channel %02d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s
        2.7.3  2.7.8  Channel %02d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s
        2.8.3  2.11.4 Channel %02d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s%s
        2.8.3  2.11.4 Channel %02d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s%s
        2.12.7 2.18.1 Channel %02d/%d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d%s%s
        2.12.7 2.18.1 Channel %02d/%d : %d[%lx] -> %d[%lx] [send] via NET/%s/%d(%d)%s%s
        2.12.7 2.18.1 Channel %02d/%d : %d[%lx] -> %d[%lx] [receive] via NET/%s/%d%s%s
        2.18.3 2.25.1 Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s
        2.18.3 2.25.1 Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s
        2.18.3 2.25.1 Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s
        2.26.2 -      Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d%s%s%s
        2.26.2 -      Channel %02d/%d : %d[%d] -> %d[%d] [send] via NET/%s/%d(%d)%s%s%s
        2.26.2 -      Channel %02d/%d : %d[%d] -> %d[%d] [receive] via NET/%s/%d%s%s%s
        """,
    ),
    rule(
        "local_channel",
        " via ",
        r" via (P2P/MNNVL|P2P/|SHM/|direct shared memory)",
        """
        2.3.5  2.4.8  Ring %02d : %d -> %d via P2P/common device
        2.5.6  2.6.4  Ring %02d : %d[%d] -> %d[%d] via P2P/common device
        2.7.3  2.7.8  Channel %02d : %d[%d] -> %d[%d] via P2P/common device%s
        2.3.5  2.4.8  Ring %02d : %d[%d] -> %d[%d] via P2P/direct pointer
        2.5.6  2.6.4  Ring %02d : %d[%lx] -> %d[%lx] via P2P/direct pointer
        2.7.3  2.13.4 Channel %02d : %d[%lx] -> %d[%lx] via P2P/direct pointer%s
        2.14.3 2.18.1 Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/direct pointer%s
        2.18.3 -      Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/direct pointer%s
        2.3.5  2.4.8  Ring %02d : %d[%d] -> %d[%d] via P2P/IPC
        2.5.6  2.6.4  Ring %02d : %d[%lx] -> %d[%lx] via P2P/IPC
        2.7.3  2.12.12 Channel %02d : %d[%lx] -> %d[%lx] via P2P/IPC%s
        2.13.4 2.13.4 Channel %02d : %d[%lx] -> %d[%lx] via P2P/IPC%s%s
        2.14.3 2.18.1 Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/IPC%s%s
        2.18.3 -      Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/IPC%s%s
        2.18.1 2.18.1 Channel %02d/%01d : %d[%x] -> %d[%x] via P2P/CUMEM%s%s
        2.18.3 2.19.4 Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/CUMEM%s%s
        2.20.3 -      Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/%s%s%s
        2.8.3  2.13.4 Channel %02d : %d[%lx] -> %d[%lx] via P2P/indirect/%d[%lx]%s
        2.14.3 2.18.1 Channel %02d/%01d : %d[%lx] -> %d[%lx] via P2P/indirect/%d[%lx]%s
        2.18.3 -      Channel %02d/%01d : %d[%d] -> %d[%d] via P2P/indirect/%d[%d]%s
        2.3.5  2.4.8  Ring %02d : %d[%d] -> %d[%d] via direct shared memory
        2.5.6  2.6.4  Ring %02d : %d[%lx] -> %d[%lx] via direct shared memory
        2.7.3  2.12.12 Channel %02d : %d[%lx] -> %d[%lx] via direct shared memory
        2.13.4 2.18.1 Channel %02d : %d[%lx] -> %d[%lx] via SHM/%s/%s
        2.18.3 2.30.4 Channel %02d : %d[%d] -> %d[%d] via SHM/%s/%s
        2.30.7 -      Channel %02d : %d[%d] -> %d[%d] via SHM/direct
        """,
    ),
    rule(
        "using_network",
        "Using ",
        # To the end of the line, or of the string that a collector or an author made of it.
        r'Using (?:network|internal Network|external Network) ([^"`\\\r\n]+)',
        """
        2.3.5 2.3.7 Using internal Network %s
        2.3.5 2.3.7 Using external Network %s
        2.6.4 -     Using network %s
        """,
    ),
    rule(
        "plugin_assigned",
        "Assigned NET plugin ",
        r"Assigned NET plugin (.+?) to comm",
        "2.27.3 - Assigned NET plugin %s to comm",
    ),
    rule(
        "plugin_initialized",
        "Initialized NET plugin ",
        r'Initialized NET plugin ([^"`\\\r\n]+)',
        "2.27.3 - Initialized NET plugin %s",
    ),
    rule(
        "adapters",
        "NET/IB : Using",
        r"NET/IB : Using((?: ?\[\d+\](?:=\{[^}]*\}?|[^\s;]+))+)",
        """
        2.4.2  2.11.4 NET/IB : Using%s ; OOB %s:%s
        2.12.7 -      NET/IB : Using%s %s; OOB %s:%s
        """,
    ),
    rule(
        "adapter",
        "NET/IB: [",
        r"NET/IB: \[(\d+)\] ([^\s:]+:)(?:\w+:)?(\d+)/(IB|RoCE)\b",
        """
        2.3.5  2.3.7  NET/IB: [%d] %s:%d/%s
        2.27.3 2.29.7 NET/IB: [%d] %s:%s:%d/%s provider=%s speed=%d context=%p pciPath=%s ar=%d
        2.30.3 - NET/IB: [%d] %s:%s:%d/%s provider=%s speed=%d context=%p pciPath=%s ar=%d oooRqSize=%d
        """,  # noqa: E501
    ),
    rule(
        "sockets",
        "NET/Socket : Using",
        r"NET/Socket : Using((?: ?\[\d+\]\S+)+)",
        "2.4.2 - NET/Socket : Using%s",
    ),
    rule(
        "socket_interface",
        "NET : Using interface ",
        r"NET : Using interface ([^\s:]+):\S",
        "2.3.5 2.3.7 NET : Using interface %s:%s",
    ),
    rule(
        "provider",
        "NET/OFI Selected ",
        r"NET/OFI Selected [Pp]rovider is (\w+)(?=[ ,*]|$)",
        """
        EFA - NET/OFI Selected Provider is efa (found 16 nics)
        EFA - NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
        """,
    ),
    rule(
        "wish",
        "NCCL_",
        # NCCL's own words, or a line of the environment, or an entry of a record in JSON.
        rf"\b({NAMES}) set (?:by environment )?to ([^\s\"]+)"
        rf"|(?:^|[\]:>|)] )\s*(?:export |declare -x )?({NAMES})=\"?([^\s\"]+)"
        rf"|\"({NAMES})\": \"([^\"]+)\"",
        """
        2.3.5   2.12.7 %s set by environment to %lu.
        2.12.10 -      %s set by environment to %lld.
        2.7.3   -      NCCL_IB_HCA set to %s
        2.28.3  -      NCCL_NET_PLUGIN set by environment to %s
        """,
    ),
    rule(
        "plugin_asked",
        "Plugin name set by env to ",
        r"(?<!TUNER/Plugin: )(?<!PROFILER/Plugin: )Plugin name set by env to (\S+)",
        """
        2.12.12 2.20.5 Plugin name set by env to %s
        2.21.5  2.25.1 NET/Plugin: Plugin name set by env to %s
        2.26.2  2.27.7 %s/Plugin: Plugin name set by env to %s
        """,
    ),
    rule(
        "plugin_not_loaded",
        "NET/Plugin",
        r"NET/Plugin ?: (?:Plugin load(?: \([^)]*\))? returned -?\d+ : |dlerror=|(?=\S+: ))(.+)",
        """
        2.4.2  2.16.5 NET/Plugin : Plugin load returned %d : %s.
        2.19.1 2.20.5 NET/Plugin : Plugin load returned %d : %s.
        2.17.1 2.18.6 NET/Plugin : Plugin load (%s) returned %d : %s
        2.19.1 2.20.5 NET/Plugin : dlerror=%s No plugin found (%s), using internal implementation
        2.21.5 2.21.5 NET/Plugin: Plugin load returned %d : %s when loading %s
        2.21.5 2.21.5 NET/Plugin: Plugin load returned %d : %s : when loading %s
        2.22.3 2.25.1 NET/Plugin: %s
        2.26.2 -      %s/Plugin: %s
        2.28.3 -      %s/Plugin: %s: %s
        """,
    ),
    rule(
        "plugin_not_found",
        "NET/Plugin: Could not find:",
        r"NET/Plugin: Could not find:",
        """
        2.22.3 2.25.1 NET/Plugin: Could not find:%s. Using internal network plugin.
        2.26.2 2.27.7 %s/Plugin: Could not find:%s. %s
        2.28.3 -      %s/Plugin: Could not find:%s%s%s
        """,
    ),
    rule(
        "plugin_not_initialized",
        "Failed to initialize NET plugin ",
        # NCCL's own two fail for reasons that have problems of their own.
        r"Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S",
        "2.28.3 - Failed to initialize NET plugin %s",
        "plugin_failed",
    ),
    rule(
        "plugin_unsupported",
        "External network plugin ",
        r"External network plugin .+ is unsupported",
        "2.28.3 - External network plugin %s is unsupported",
        "plugin_failed",
    ),
    rule(
        "plugin_symbol",
        "Failed to find ncclNetPlugin symbol (",
        r"Failed to find ncclNetPlugin symbol \(",
        """
        2.13.4 2.18.6 NET/Plugin: Failed to find ncclNetPlugin symbol (v4 or v5).
        2.19.1 2.25.1 NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5). ncclNetPlugin symbols v4 and lower are not supported.
        """,  # noqa: E501
        "plugin_failed",
    ),
    rule(
        "plugin_ofi",
        "NET/OFI",
        r"NET/OFI .*initialization failed",
        "EFA - NET/OFI aws-ofi-nccl initialization failed",
        "plugin_failed",
    ),
    rule(
        "no_ib_device",
        "NET/IB : No device found.",
        r"NET/IB : No device found\.",
        "2.4.2 - NET/IB : No device found.",
        "no_ib_device",
    ),
    rule(
        "no_devices",
        "devices() returned 0 devices",
        r"call to devices\(\) returned 0 devices",
        "log - call to devices() returned 0 devices",  # seen in a log of 2.3.7, not in its source
        "no_ib_device",
    ),
    rule(
        "verbs_library",
        "libibverbs.so",
        # The plain name is tried first and alone proves nothing.
        r"Failed to open libibverbs\.so\[\.1\]|Cou(?:nt|ld) not open libibverbs\.so\.1\b",
        """
        2.3.5  2.29.7 Failed to open libibverbs.so[.1]
        2.30.3 -      Count not open %s
        """,
        "verbs_library_missing",
    ),
    rule(
        "memlock",
        "Cannot allocate memory",
        r"Call to ibv_\w+ failed with error Cannot allocate memory",
        """
        2.3.5 - Call to ibv_reg_mr failed with error %s
        2.12.7 - Call to ibv_reg_mr_iova2 failed with error %s
        2.3.5 - Call to ibv_create_cq failed with error %s
        2.3.5 - Call to ibv_create_qp failed with error %s
        """,
        "memlock",
    ),
    rule(
        "no_such_network",
        "Error: network ",
        r"Error: network .+ not found\.",
        "2.10.3 2.26.6 Error: network %s not found.",
        "network_not_found",
    ),
    rule(
        "no_network",
        "Failed to initialize any NET plugin",
        r"Failed to initialize any NET plugin",
        "2.27.3 - Failed to initialize any NET plugin",
        "network_not_found",
    ),
    rule(
        "gpudirect_of_adapter",
        "GPU Direct RDMA Disabled for HCA ",
        r"NET/(?!Socket )[^/]+ : GPU Direct RDMA Disabled for HCA \d",
        """
        2.5.6  2.12.12 NET/IB : GPU Direct RDMA Disabled for HCA %d '%s' (no module)
        2.13.4 -       NET/%s : GPU Direct RDMA %s for HCA %d '%s'
        """,
    ),
    rule(
        "gpudirect_of_pair",
        "GPU Direct RDMA Disabled for GPU",
        r"(?<!NET/Socket : )GPU Direct RDMA Disabled for GPU[ /]",
        """
        2.3.5  2.3.7  NET/IB : GPU Direct RDMA Disabled for GPU %d / HCA %s (%s)
        2.3.5  2.3.7  NET/IB : GPU Direct RDMA Disabled for GPU %d / HCA %s (distance %d >= %d)
        2.4.2  2.4.8  NET/%s : GPU Direct RDMA Disabled for GPU %d[%d] / HCA %d (distance %d >= %d)
        2.4.2  2.4.8  NET/IB : GPU Direct RDMA Disabled for GPU %d[%d] / HCA %d '%s' (no module or not supported by GPU)
        2.5.6  2.5.7  NET/%s : GPU Direct RDMA Disabled for GPU %lx / HCA %d (distance %d >= %d)
        2.6.4  2.20.5 GPU Direct RDMA Disabled for GPU %lx / HCA %d (distance %d > %d)
        2.21.5 2.23.4 GPU Direct RDMA Disabled for GPU %lx / HCA %lx (distance %d > %d)
        2.24.3 2.28.9 GPU Direct RDMA Disabled for GPU %d / HCA %lx (distance %d > %d)
        2.29.2 2.29.7 GPU Direct RDMA Disabled for %s
        """,  # noqa: E501
    ),
    rule(
        "peer",
        "Got completion ",
        # 12 is IBV_WC_RETRY_EXC_ERR; 5, flushed, only follows another error.
        r"Got completion .*(?:error |status=)(?:12\b|\w+\(12\)|\(\w+\)12\b)",
        """
        2.3.5  2.9.9  NET/IB : Got completion with error %d, opcode %d, len %d, vendor err %d
        2.10.3 2.17.1 NET/IB : Got completion from peer %s with error %d, opcode %d, len %d, vendor err %d
        2.18.1 2.19.4 NET/IB : Got completion from peer %s with error %d, opcode %d, len %d, vendor err %d (%s)%s%s%s%s
        2.20.3 2.21.5 NET/IB : Got completion from peer %s with status=%d opcode=%d len=%d vendor err %d (%s)%s%s%s%s
        2.22.3 2.23.4 NET/IB: Got completion from peer %s with status=%d opcode=%d len=%d vendor err %d (%s)%s%s%s%s hca %s
        2.24.3 2.28.3 NET/IB: Got completion from peer %s with status=%d opcode=%d len=%u vendor err %u (%s)%s%s%s%s hca %s
        2.28.7 2.28.9 NET/IB: Got completion from peer %s with status=%s(%d) opcode=%s(%d) reqSize=%d vendor_err=%u req_type=%s%s%s%s%s hca %s
        2.28.7 - NET/IB/GIN: Got completion from peer %s with status=%d opcode=%d len=%u vendor err %u (%s)%s%s%s%s hca %s
        2.29.2 - NET/IB: Got completion from peer %s with status=%s(%d) opcode=%s(%d) vendor_err=%u %s%s%s%s hca %s
        2.29.7 - NET/IB: %s: Got completion with error (devIndex=%d, wc->status=(%s)%d, wc->opcode=(%s)%d, wc->wr_id=%ld, wc->qp_num=%u, wc->byte_len=%d)
        """,  # noqa: E501
        "peer_unreachable",
    ),
    rule(
        "connect_failed",
        "onnect",
        r"[Cc]onnect to \S+ (?:failed : |returned -?\d+\()|PollConnect to \S+ failed with error "
        r"|Call to connect timeout : ",
        """
        2.3.5  2.3.7  Call to connect timeout : %s
        2.4.2  2.9.9  Connect to %s failed : %s
        2.10.3 2.15.5 Net : Connect to %s failed : %s
        2.16.2 2.23.4 socketStartConnect: Connect to %s failed : %s
        2.20.3 2.23.4 socketPollConnect: Connect to %s returned %d(%s) errno %d(%s)
        2.24.3 2.26.6 %s: Connect to %s failed : %s
        2.27.3 2.28.9 socketPollConnect to %s failed with error %s
        2.27.3 -      %s: connect to %s failed : %s
        2.29.2 -      ncclOsSocketPollConnect to %s failed with error %s
        """,
        "connection_failed",
    ),
    rule(
        "connection_lost",
        "Connection closed",
        r"Connection closed by remote peer",
        """
        2.3.5  2.9.9  Net : Connection closed by remote peer
        2.10.3 2.15.5 Net : Connection closed by remote peer %s
        2.16.2 -      socketProgress: Connection closed by remote peer %s
        """,
        "connection_failed",
    ),
    rule(
        "receive_failed",
        "Call to ",
        r"Call to (?:recv(?: from \S+)?|send to \S+) failed : ",
        """
        2.4.2  2.9.9  Call to recv failed : %s
        2.10.3 2.15.5 Net : Call to recv from %s failed : %s
        2.16.2 2.23.4 socketProgressOpt: Call to recv from %s failed : %s
        2.24.3 2.28.9 socketProgressOpt: Call to %s %s failed : %s
        2.29.2 -      ncclOsSocketProgressOpt: Call to %s %s failed : %s
        """,
        "connection_failed",
    ),
    rule(
        "retries_exceeded",
        "exceeded ",
        r"exceeded (?:retries|timeouts|error retry count)\b",
        """
        2.16.2 2.23.4 socketStartConnect: exceeded retries (%d)
        2.16.2 2.23.4 socketStartConnect: exceeded timeouts (%d)
        2.16.2 2.23.4 socketPollConnect: exceeded retries (%d)
        2.16.2 2.23.4 socketPollConnect: exceeded timeouts (%d)
        2.24.3 2.26.6 %s: connect returned %s, exceeded error retry count (%d)
        2.27.3 -      %s: connect to %s returned %s, exceeded error retry count after %d attempts
        2.24.3 2.26.6 socketTryAccept: exceeded error retry count (%d), %s
        2.27.3 2.28.9 socketTryAccept: exceeded error retry count after %d attempts, %s
        2.29.2 -      ncclOsSocketTryAccept: exceeded error retry count after %d attempts, %s
        """,
        "connection_failed",
    ),
    rule(
        "no_interface",
        "nterface found",
        r"no socket interface found|NET/Socket : no interface found"
        r"|NET/IB : No IP interface found\.|No usable listening interface found"
        r"|No interface found in the same subnet as remote address",
        """
        2.3.5 2.26.6 Net : No interface found in the same subnet as remote address %s
        2.3.5 -      NET/IB : No IP interface found.
        2.3.5 -      NET/Socket : no interface found
        2.4.2 -      NET/Socket : No usable listening interface found
        2.4.8 -      Bootstrap : no socket interface found
        """,
        "no_interface",
    ),
    rule(
        "no_start_up_device",
        "no device found ",
        r"no device found (?:matching|after excluding) .*NCCL_OOB_NET_IFNAME",
        """
        2.23.4 2.23.4 no device found matching NCCL_OOB_NET_IFNAME=%s, ignoring
        2.24.3 -      no device found matching %s%s, verify NCCL_OOB_NET_IFNAME
        2.24.3 -      no device found after excluding %s%s, verify NCCL_OOB_NET_IFNAME
        """,
        "no_interface",
    ),
    rule(
        "speed_change",
        "speed change detected",
        r"NET/IB : .*speed change detected: ",
        "2.30.7 - NET/IB : %s:%d speed change detected: %d -> %s Mbps",
        "link_renegotiated",
    ),
    rule(
        "port_event",
        "async ",
        r"async (?:fatal |error )?event\b.*\bport (?:error|active)",
        """
        2.3.5  2.19.4 NET/IB : Got async event : %s
        2.20.3 2.22.3 NET/IB : %s:%d Got async event : %s
        2.23.4 2.28.3 NET/IB : %s:%d Got async error event: %s
        2.23.4 -      NET/IB : %s:%d async fatal event: %s
        2.28.7 -      NET/IB : %s:%d Got non-fatal async event: %s(%d)
        """,
        "link_renegotiated",
    ),
    rule(
        "rank_twice",
        "has already checked in",
        r"rank \d+ of \d+ ranks has already checked in",
        "2.3.7 - Bootstrap Root : rank %d of %d ranks has already checked in",
        "rank_twice",
    ),
    rule(
        "timeout",
        "timed out",
        r"Some NCCL operations have failed or timed out",
        "torch - Some NCCL operations have failed or timed out.",
        "timeout",
    ),
    rule(
        "watchdog",
        "Watchdog caught ",
        r"Watchdog caught collective operation timeout",
        "torch - Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "timeout",
    ),
    rule(
        "aborted",
        "bort",
        r"NCCL communicator was aborted|\bAbort (?:START|COMPLETE)\b|\bis in abort state",
        """
        torch  -      NCCL communicator was aborted on rank 0.
        2.12.7 2.21.5 comm %p rank %d nranks %d cudaDev %d busId %lx - Abort COMPLETE
        2.22.3 -      comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETE
        2.28.3 -      comm %p rank %d nRanks %d cudaDev %d busId %lx - Abort START
        2.17.1 -      Comm %p is in abort state
        """,
        "aborted",
    ),
)

# What to do, in the order in which findings are told: causes before what follows from them.
ADVICE = {
    "no_ib_device": "no adapter port is active and passes NCCL_IB_HCA: see ibstat, "
    "/sys/class/infiniband, and in a container /dev/infiniband",
    "verbs_library_missing": "install libibverbs (rdma-core) where the job runs, "
    "in a container inside it",
    "memlock": "RDMA pins memory: raise the limit of locked memory (ulimit -l unlimited) "
    "in the job itself, not in a login shell",
    "plugin_failed": "the network plugin could not be used: check its path, its own libraries and "
    "that it fits this NCCL; NCCL_NET_PLUGIN=none does without it",
    "network_not_found": "NCCL_NET names a network that is not there, or none could start: "
    "unset NCCL_NET, or mend that network",
    "fell_back_to_sockets": "the faster network was asked for and TCP was used: "
    "see the other findings, or NCCL_DEBUG_SUBSYS=INIT,NET,ENV",
    "gpudirect_off": "data passes through host memory: load nvidia-peermem or use DMA-BUF, "
    "and see nvidia-smi topo -m for adapters close to the GPUs",
    "no_interface": "no IP interface was left: check NCCL_SOCKET_IFNAME and NCCL_OOB_NET_IFNAME "
    "against ip addr on each node",
    "suspect_interface": "this interface seldom joins nodes: set NCCL_SOCKET_IFNAME to the one "
    "that does",
    "rank_twice": "two processes have the same rank: give each node another node rank",
    "peer_unreachable": "the other end did not answer: check cable, switch, routes and firewall, "
    "on RoCE the GID index, between these two nodes",
    "connection_failed": "look at the other end first: it may have failed before; "
    "else a firewall or the wrong interface",
    "link_renegotiated": "a link changed its state or speed during the job: "
    "check cable, transceiver and switch port",
    "timeout": "some rank did not come: look for the rank that failed or stands still, "
    "NCCL itself waits for ever",
    "aborted": "the communicator was given up because of an earlier error: "
    "look for the first error of any rank",
}

# A name that ends where the text was cut may be half a name, but for these; and the beginning of
# one of these is half a name wherever it stands.
KNOWN_NAMES = re.compile(r"Socket|IB|IBext(?:_v\d+)?|(?:AWS )?Libfabric|NCCL RDMA Plugin v\d+")
BEGINNINGS = ("Socket", "IB", "Libfabric", "AWS Libfabric", "NCCL RDMA Plugin v")
# Networks of plugins that drive the adapters of the NET/IB list.
OVER_ADAPTERS = re.compile(r"IB|IBext.*|NCCL RDMA Plugin v.*")
SUSPECT_INTERFACES = ("lo", "docker*", "veth*", "br-*", "virbr*", "tailscale*")
UNREACHABLE = re.compile(r"No route to host|Network is unreachable|Connection timed out")
# The slowest first: where ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")

# --- from lines to messages --------------------------------------------------------------------

COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Where a message begins. The host name is all word characters before the pid, so that the end of
# a torn message that touches it is lost with it, never taken for a whole one.
BEGINNING = re.compile(r"(?<![\w.-])[\w.-]{1,253}:\d+:\d+ \[|NCCL (?:INFO|WARN)\b")
PREFIX = re.compile(r"[\w.-]+:\d+:\d+ \[-?\d+\] (?:\S+:\d+ (?:\(\S*\) )?)?")


def messages(line: str) -> Iterator[tuple[str, bool]]:
    """The messages of a line, and of each whether another one that follows may have cut it."""
    starts = [0, *(match.start() for match in BEGINNING.finditer(line)), len(line)]
    pieces = [line[a:b] for a, b in itertools.pairwise(starts) if b > a]
    whole = []
    for piece in pieces:
        if whole and PREFIX.fullmatch(whole[-1]):
            whole[-1] += piece
        else:
            whole.append(piece)
    for number, piece in enumerate(whole, 1):
        yield piece[:MESSAGE_LIMIT], number < len(whole)


# --- the finding -------------------------------------------------------------------------------


@dataclass
class Problem:
    id: str
    line: str
    advice: str


@dataclass
class Finding:
    """What a text says of the network. None and empty: the text does not say it.

    channels counts lines of connections: network, p2p, mnnvl (NVLink between nodes), shm;
    gpudirect is the number of those over the network that have GPUDirect RDMA.
    """

    version: str | None = None
    network: str | None = None  # NCCL's own name for it
    networks: list[str] = field(default_factory=list)  # more than one: ranks differ
    transport: str = "unknown"  # infiniband, roce, sockets, efa, plugin, local
    devices: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    gpudirect: int | None = None
    channels: dict[str, int] = field(default_factory=dict)
    nodes: int | None = None
    reason: str | None = None  # why sockets, where nothing failed: somebody asked for them
    problems: list[Problem] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        return self.transport != "unknown" or self.network is not None

    def to_dict(self) -> dict:
        return asdict(self)


class Reader:
    """Takes the lines of a text, in whatever order, and keeps what they say."""

    def __init__(self) -> None:
        self.any_text = self.saw_line_end = False
        self.version = self.version_in_error = None
        self.nodes: int | None = None
        self.channels: Counter[str] = Counter()
        self.with_gpudirect = 0
        # Each network by the first line that names it.
        self.connected: dict[str, str] = {}
        self.using: dict[str, str] = {}
        self.assigned: dict[str, str] = {}
        self.initialized: dict[str, str] = {}
        self.adapters_used: set[int] = set()
        self.adapter_list = False
        self.devices: dict[str, None] = {}  # mlx5_0:1, in the order in which they are listed
        self.kinds: dict[int, set[str]] = {}  # IB, RoCE: of the adapter of a number, on any node
        self.interfaces: dict[str, str] = {}
        self.providers: dict[str, str] = {}
        self.wishes: dict[str, tuple[str, str]] = {}
        self.missing_plugin = ""
        self.without_gpudirect: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def read(self, line: str) -> None:
        """One line; only the last of a text may lack its end, and may then be cut."""
        ends = line.endswith(("\n", "\r"))
        cut_at_end = self.saw_line_end and not ends
        self.saw_line_end = self.saw_line_end or ends
        self.any_text = self.any_text or "NCCL INFO" in line or "NCCL WARN" in line
        rules = [rule for rule in RULES if rule.literal in line]
        if not rules:
            return
        for text, followed in messages(COLOURS.sub("", line).rstrip()):
            for rule in rules:
                if match := rule.pattern.search(text):
                    self.take(rule, match, quote(text), followed or cut_at_end)

    def take(self, rule: Rule, match: re.Match, text: str, cut: bool) -> None:
        self.any_text = True
        if rule.problem:
            self.notes.setdefault(rule.problem, text)
        if method := getattr(self, f"on_{rule.name}", None):
            method(match, text, cut)

    def on_version(self, match, text, cut):
        if cut and match.end() == len(match.string.rstrip()):  # its last number may lack a digit
            self.version_in_error = self.version_in_error or (match[1] if match[2] else None)
        elif match[2] or "RCCL" in text:
            self.version = self.version or match[1] + match[2]
        else:
            self.version_in_error = self.version_in_error or match[1]

    def on_nodes(self, match, text, cut):
        self.nodes = max(self.nodes or 0, int(match[1]))

    def on_network_channel(self, match, text, cut):
        self.connected.setdefault(match[1], text)
        gpudirect = "/GDRDMA" in match.string[match.end() :]
        if cut and not gpudirect:  # its end may have said so: then it counts for neither
            return
        self.channels["network"] += 1
        self.with_gpudirect += gpudirect
        self.adapters_used.add(int(match[2]))

    def on_local_channel(self, match, text, cut):
        kind = {"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(match[1], "shm")
        self.channels[kind] += 1

    def on_using_network(self, match, text, cut):
        self.name(self.using, match[1], text, cut)

    def on_plugin_assigned(self, match, text, cut):
        self.name(self.assigned, match[1], text, cut=False)

    def on_plugin_initialized(self, match, text, cut):
        self.name(self.initialized, match[1], text, cut)

    def name(self, names: dict[str, str], name: str, text: str, cut: bool) -> None:
        name = name.strip()
        half = cut or any(known.startswith(name) for known in BEGINNINGS)
        if not half or KNOWN_NAMES.fullmatch(name):
            names.setdefault(name, text)

    def on_adapters(self, match, text, cut):
        for number, merged, alone in re.findall(r"\[(\d+)\](?:=\{([^}]*)|([^\s;]+))", match[1]):
            for device, port, kind in re.findall(
                r"([^\s:\[\],{}/]+):(\d+)[\d:]*/(IB|RoCE)\b", merged or alone
            ):
                self.adapter_list = True
                self.adapter(int(number), f"{device}:{port}", kind)

    def on_adapter(self, match, text, cut):
        self.adapter(int(match[1]), match[2] + match[3], match[4])

    def adapter(self, number: int, name: str, kind: str) -> None:
        self.devices.setdefault(name)
        self.kinds.setdefault(number, set()).add(kind)

    def on_sockets(self, match, text, cut):
        for name in re.findall(r"\[\d+\]([^\s:\[\]]+):[^\s<>]+<\d+>", match[1]):
            self.interfaces.setdefault(name, text)

    def on_socket_interface(self, match, text, cut):
        self.interfaces.setdefault(match[1], text)

    def on_provider(self, match, text, cut):
        if not cut or match.end() < len(match.string.rstrip()):
            self.providers.setdefault(match[1], text)

    def on_wish(self, match, text, cut):
        name, value = (group for group in match.groups() if group)
        self.wishes.setdefault(name, (value.rstrip("."), text))

    def on_plugin_asked(self, match, text, cut):
        self.wishes.setdefault("NCCL_NET_PLUGIN", (match[1], text))

    def on_plugin_not_loaded(self, match, text, cut):
        asked = re.escape(self.wishes.get("NCCL_NET_PLUGIN", ("ccl-net", ""))[0])
        # A plugin that nobody asked for and that is not there is what most machines have.
        own = rf"[^\s:]*(?:ccl-net|{asked})[^\s:]*: cannot open shared object file"
        if re.search(rf"(?:^|\s){own}", match[1]):
            self.missing_plugin = self.missing_plugin or text
        elif re.search(r"\S: \S", match[1]):
            self.notes.setdefault("plugin_failed", text)

    def on_plugin_not_found(self, match, text, cut):
        self.missing_plugin = self.missing_plugin or text

    def on_gpudirect_of_adapter(self, match, text, cut):
        self.without_gpudirect.setdefault("adapter", text)

    def on_gpudirect_of_pair(self, match, text, cut):
        self.without_gpudirect.setdefault("pair", text)

    def on_connect_failed(self, match, text, cut):
        if UNREACHABLE.search(text):
            self.notes.setdefault("peer_unreachable", text)

    on_retries_exceeded = on_connect_failed

    # What it all amounts to.

    def finding(self) -> Finding:
        names, transport = self.decision()
        networks = sorted(names, key=self.speed)
        found = Finding(
            version=self.version or self.version_in_error,
            network=networks[0] if networks else None,
            networks=networks,
            transport=transport,
            devices=list(self.devices),
            interfaces=list(self.interfaces) if transport == "sockets" else [],
            gpudirect=self.with_gpudirect if self.channels["network"] else None,
            channels=dict(+self.channels),
            nodes=self.nodes,
        )
        if transport == "sockets":
            found.reason = self.reason()
        lines = self.problem_lines(found)
        found.problems = [Problem(id, lines[id], ADVICE[id]) for id in ADVICE if id in lines]
        return found

    def decision(self) -> tuple[Iterable[str], str]:
        """The networks that the first two kinds of evidence name, and the transport."""
        if self.connected:
            return self.connected, self.slowest(self.connected)
        # A rank amid its node has none but local channels, though others leave the node.
        amid_node = (self.nodes or 1) > 1 and not self.channels["mnnvl"]
        if self.channels and not amid_node:
            return self.using, "local"
        if self.using:
            return self.using, self.slowest(self.using)
        if plugins := self.assigned or self.initialized:
            return (), self.slowest(plugins)
        if self.adapter_list:
            return (), self.adapter_kind()
        # To 2.4.7 sockets were listed before a plugin was tried.
        return (), "sockets" if self.interfaces and not self.providers else "unknown"

    def slowest(self, names: Iterable[str]) -> str:
        return SLOWEST[min(map(self.speed, names))]

    def speed(self, name: str) -> int:
        return SLOWEST.index(self.transport(name))

    def transport(self, name: str) -> str:
        """What moves the data of a network that goes by this name."""
        if name == "Socket":
            return "sockets"
        if name in ("Libfabric", "AWS Libfabric"):
            return "efa" if set(self.providers) == {"efa"} else "plugin"
        if OVER_ADAPTERS.fullmatch(name) and (name == "IB" or self.devices):
            return self.adapter_kind()
        return "plugin"

    def adapter_kind(self) -> str:
        """Of the adapters listed; where they are of both kinds, of those that are connected."""
        kinds = set().union(*self.kinds.values())
        if len(kinds) > 1 and len(self.connected) == 1 and self.adapters_used <= set(self.kinds):
            kinds = set().union(*(self.kinds[number] for number in self.adapters_used))
        if len(kinds) != 1:
            return "unknown"
        return "infiniband" if "IB" in kinds else "roce"

    def wish(self, name: str) -> str:
        return self.wishes.get(name, ("", ""))[0]

    def reason(self) -> str | None:
        """Who asked for sockets."""
        if self.wish("NCCL_IB_DISABLE") not in ("", "0"):
            return f"NCCL_IB_DISABLE={self.wish('NCCL_IB_DISABLE')} turned InfiniBand and RoCE off"
        if self.wish("NCCL_NET") == "Socket":
            return "NCCL_NET=Socket asked for sockets"
        return None

    def problem_lines(self, found: Finding) -> dict[str, str]:
        """Each problem's id, and the line that told it."""
        lines = dict(self.notes)
        plugin_works = any(name not in ("IB", "Socket") for name in found.networks)
        asked = self.wish("NCCL_NET_PLUGIN").lower() not in ("", "none")
        if self.missing_plugin and asked and not plugin_works:
            lines.setdefault("plugin_failed", self.missing_plugin)
        if found.transport == "sockets":
            if not found.reason and (line := self.asked_for_more(lines)):
                lines["fell_back_to_sockets"] = line
            for name in filter(suspect, found.interfaces):
                lines.setdefault("suspect_interface", self.interfaces[name])
        if line := self.gpudirect_line(found):
            lines["gpudirect_off"] = line
        return lines

    def asked_for_more(self, lines: dict[str, str]) -> str | None:
        """The line that shows that something faster than sockets was meant to be used."""
        for name, (value, line) in self.wishes.items():
            if (
                name == "NCCL_IB_HCA"
                or (name == "NCCL_IB_DISABLE" and value == "0")
                or (name == "NCCL_NET" and OVER_ADAPTERS.fullmatch(value))
            ):
                return line
        return lines.get("plugin_failed")

    def gpudirect_line(self, found: Finding) -> str | None:
        """The line that shows GPUDirect RDMA off where the network could do it."""
        if found.transport in ("sockets", "local"):
            return None
        over_network = found.channels.get("network", 0)
        if over_network and found.gpudirect == over_network:
            return None
        if line := self.without_gpudirect.get("adapter"):
            return line
        if found.gpudirect:  # a pair that is far apart is off on healthy machines too
            return None
        if line := self.without_gpudirect.get("pair"):
            return line
        rdma = found.transport in ("infiniband", "roce", "efa") or found.network == "IB"
        return next(iter(self.connected.values())) if over_network and rdma else None


def suspect(interface: str) -> bool:
    return any(fnmatch.fnmatchcase(interface, pattern) for pattern in SUSPECT_INTERFACES)


def quote(text: str) -> str:
    text = text.strip()
    return text if len(text) <= QUOTE_LIMIT else text[: QUOTE_LIMIT - 1] + "…"


def find(lines: Iterable[str]) -> Finding:
    """What the lines of one job's text say, of any of its ranks and nodes."""
    reader = Reader()
    for line in lines:
        for part in line.splitlines(keepends=True) if "\r" in line else (line,):
            reader.read(part)
    return reader.finding()


# --- for people --------------------------------------------------------------------------------

TRANSPORTS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE, RDMA over Ethernet",
    "sockets": "TCP sockets",
    "efa": "EFA",
    "plugin": "the network of a plugin",
    "local": "no network, but NVLink, PCIe or memory inside a node",
    "unknown": "RDMA adapters, though the text does not say whether InfiniBand or RoCE",
}
# Why no faster network was used, the most telling first.
REASONS = ("verbs_library_missing", "no_ib_device", "plugin_failed", "network_not_found")


def in_words(found: Finding) -> list[str]:
    """Sentences for people: what was used, then why nothing faster, then what to do."""
    sentences = [used(found)] if found.decided else ["NCCL's text names no network."]
    sentences += connections(found)
    if len(found.networks) > 1:
        names = ", ".join(found.networks)
        sentences.append(f"Ranks differ ({names}); the slowest sets the pace.")
    if found.transport == "sockets":
        sentences.append(why_sockets(found))
    for problem in found.problems:
        sentences.append(f"{problem.id}: {problem.line}\n    -> {problem.advice}")
    return sentences


def used(found: Finding) -> str:
    version = f"NCCL {found.version}" if found.version else "NCCL"
    what = TRANSPORTS[found.transport]
    if found.transport == "local" and "mnnvl" in found.channels:
        what = "no network, but NVLink, between nodes too (MNNVL)"
    elif found.network and found.transport != "local":
        what += f" (network {found.network})"
    over = found.interfaces if found.transport == "sockets" else found.devices
    if over and found.transport in ("sockets", "infiniband", "roce"):
        what += f" over {', '.join(over)}"
    nodes = f", {found.nodes} node{'s' * (found.nodes > 1)}" if found.nodes else ""
    return f"{version} used {what}{nodes}."


def connections(found: Finding) -> list[str]:
    """Of the lines of connections; each rank writes its own end."""
    parts = []
    if over_network := found.channels.get("network"):
        gpudirect = f", {found.gpudirect} of them with GPUDirect RDMA"
        parts.append(
            f"{over_network} over the network" + gpudirect * (found.transport != "sockets")
        )
    if local := sum(count for kind, count in found.channels.items() if kind != "network"):
        parts.append(f"{local} without a network")
    return [f"Connections seen: {'; '.join(parts)}."] if parts else []


def why_sockets(found: Finding) -> str:
    if why := cause(found):
        return f"Why not another network: {why}."
    return f"The text does not say why not another network; to see it, {HOW_TO_ASK}."


def cause(found: Finding) -> str:
    """Of sockets: who asked for them, or what NCCL says of the others; may be empty."""
    if found.reason:
        return found.reason
    lines = {problem.id: problem.line for problem in found.problems}
    for line in (lines[id] for id in REASONS if id in lines):
        message = re.split(r"NCCL (?:INFO|WARN) ", line)[-1]
        return f'NCCL says "{message}"'
    return ""


def in_one_line(found: Finding) -> str:
    """What was used and, of sockets, why; then the names of the problems, to be looked up."""
    said = used(found).removesuffix(".") if found.decided else "NCCL's text names no network"
    if found.transport == "sockets":
        said += f", because {why}" if (why := cause(found)) else ", and does not say why"
    names = ", ".join(problem.id for problem in found.problems)
    return f"{said}; problems: {names}" if names else said


# --- command line ------------------------------------------------------------------------------


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"nccl_log.py: error: {message}; see --help\n")


def files_in(paths: list[str]) -> list[Path]:
    """The files named, and of each folder those that may be text."""
    found = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            found += [file for file in inside if not binary(file)]
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"no such file or folder: {name}")
    return found


def binary(path: Path) -> bool:
    """Whether a file of a folder is none to read: a checkpoint can have gigabytes."""
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file as they come; universal newlines end them at carriage returns too."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(LINE_LIMIT):
            yield line


def find_in_files(paths: list[str]) -> Finding:
    reader = Reader()
    path: Path | str = ", ".join(paths)
    try:
        for path in files_in(paths):
            reader.saw_line_end = True  # a file's lines have one, unless they are cut
            for line in lines_of(path):
                reader.read(line)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from None
    if not reader.any_text:
        raise UserError(f"no text of NCCL in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def of_processes(pattern: str, host: str, pids: Iterable[int]) -> Finding | None:
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None if nothing is there.

    By their ids, because earlier runs may have left files of theirs in the same folder.
    """
    names = {"h": host.partition(".")[0], "%": "%"}
    paths = set()
    for pid in pids:
        names["p"] = str(pid)
        paths.add(re.sub("%(.)", lambda match: names.get(match[1], match[0]), pattern))
    with contextlib.suppress(UserError):
        return find_in_files(sorted(filter(os.path.isfile, paths)))
    return None


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Which network NCCL used, and why not another, from its debug text.",
        epilog=f"To get that text, {HOW_TO_ASK}. "
        "Exit code: 0 decided, 1 nothing decided, 2 no such file or no text of NCCL.",
    )
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        found = find_in_files(args.paths)
    except UserError as error:
        print(f"nccl_log.py: error: {error}", file=sys.stderr)
        return 2
    try:
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have a log's characters
        tell(found, args.json)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.decided else 1


def tell(found: Finding, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_dict()))
    elif found.decided or found.problems:
        print("\n".join(in_words(found)))
    if not found.decided:
        print(f"nccl_log.py: nothing decided: {HOW_TO_ASK}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
