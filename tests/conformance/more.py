# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""What rdma-core's tests leave out on soft-RoCE: asynchronous events, several QPs on one CQ, UC, fork safety, rsockets, and
the distribution's own programs. Run by suite.py like the others, and compared in the same way: a program that ends with
another status under libmigr is a difference, whatever the status is.
"""
import os
import shutil
import signal
import subprocess
import time
import unittest

from pyverbs import enums as e
from pyverbs.cq import CQ
from pyverbs.srq import SrqAttr

from tests import utils
from tests.base import RCResources, RDMATestCase

ADDRESS = DEVICE = GID_INDEX = None     # set by suite.py
LISTEN_TIMEOUT_S = 20
END_TIMEOUT_S = 40
MESSAGES = 20


class AsyncEventTest(RDMATestCase):
    """Events that a soft-RoCE device raises, and their acknowledgement."""

    def players(self, resources=RCResources, **args):
        client = resources(**self.dev_info, **args)
        server = resources(**self.dev_info, **args)
        client.pre_run(server.psns, server.qps_num)
        server.pre_run(client.psns, client.qps_num)
        self.client, self.server = client, server
        return client, server

    def expect_event(self, ctx, kind):
        event = ctx.get_async_event()
        self.assertEqual(event.event_type, kind)
        event.ack()

    def test_srq_limit(self):
        client, server = self.players(with_srq=True)
        server.srq.modify(SrqAttr(srq_limit=1), e.IBV_SRQ_LIMIT)
        self.assertEqual(server.srq.query().srq_limit, 1)
        utils.traffic(client, server, MESSAGES, self.gid_index, self.ib_port)
        self.expect_event(server.ctx, e.IBV_EVENT_SRQ_LIMIT_REACHED)

    def test_srq_limit_again(self):
        client, server = self.players(with_srq=True)
        for _ in range(3):
            utils.post_recv(server, utils.get_recv_wr(server))
            server.srq.modify(SrqAttr(srq_limit=1), e.IBV_SRQ_LIMIT)
            utils.send(client, utils.get_send_elements(client, False)[0])
            utils.poll_cq(client.cq)
            utils.poll_cq(server.cq)
            self.expect_event(server.ctx, e.IBV_EVENT_SRQ_LIMIT_REACHED)

    def test_cq_overrun(self):
        class SmallCq(RCResources):
            def create_cq(self):
                self.cq = CQ(self.ctx, 1, None, None, 0)

        client, server = self.players(SmallCq)
        for left in range(server.cq.cqe, -1, -1):
            utils.post_recv(server, utils.get_recv_wr(server))
            utils.send(client, utils.get_send_elements(client, False)[0])
            if left:    # the one too many is never answered
                utils.poll_cq(client.cq)
        self.expect_event(server.ctx, e.IBV_EVENT_CQ_ERR)


class SharedCqTest(AsyncEventTest):
    """Many QPs on one CQ: each completion names its own."""

    test_srq_limit = test_srq_limit_again = test_cq_overrun = None

    def test_eight_qps_on_one_cq(self):
        client, server = self.players(qp_count=8)
        seen = []
        for i in range(8):
            utils.post_recv(server, utils.get_recv_wr(server), qp_idx=i)
            utils.send(client, utils.get_send_elements(client, False)[0], qp_idx=i)
            utils.poll_cq(client.cq)
            seen += [wc.qp_num for wc in utils.poll_cq(server.cq)]
        self.assertEqual(seen, server.qps_num)


def listening(pid):
    """`pid` has a TCP socket or an rdma_cm id that listens."""
    shown = subprocess.run(["ss", "-H", "-l", "-t", "-p"], capture_output=True, text=True, check=False).stdout
    shown += subprocess.run(["rdma", "resource", "show", "cm_id"], capture_output=True, text=True, check=False).stdout
    return any(f"pid={pid}," in line or (f"pid {pid} " in line and "LISTEN" in line) for line in shown.splitlines())


class ProgramTest(unittest.TestCase):
    """A server and a client, both of the distribution."""

    def pair(self, server, client, env=None):
        if not shutil.which(server[0]):
            self.skipTest(f"{server[0]} is not installed")
        env = {**os.environ, **(env or {})}
        serving = subprocess.Popen(server, env=env)     # pylint: disable=consider-using-with
        try:
            deadline = time.monotonic() + LISTEN_TIMEOUT_S
            while not listening(serving.pid):
                self.assertIsNone(serving.poll(), f"{server[0]} ended with {serving.returncode}")
                self.assertLess(time.monotonic(), deadline, f"{server[0]} does not listen")
                time.sleep(0.1)
            done = subprocess.run(client, env=env, timeout=END_TIMEOUT_S, check=False)
            self.assertEqual(done.returncode, 0, client)
            self.assertEqual(serving.wait(END_TIMEOUT_S), 0, server)
        finally:
            if serving.poll() is None:
                serving.send_signal(signal.SIGKILL)
                serving.wait()

    def pingpong(self, name, *options, env=None):
        server = [name, "-d", DEVICE, "-g", str(GID_INDEX), "-n", "100", *options]
        self.pair(server, server + [ADDRESS], env)

    def perftest(self, name, *options):
        server = [name, "-d", DEVICE, "-x", str(GID_INDEX), "-F", "-n", "100", "-s", "4096", *options]
        self.pair(server, server + [ADDRESS])

    def test_rc_pingpong(self):
        self.pingpong("ibv_rc_pingpong")

    def test_rc_pingpong_events(self):
        self.pingpong("ibv_rc_pingpong", "-e")

    def test_rc_pingpong_new_post_send(self):
        self.pingpong("ibv_rc_pingpong", "-N")

    def test_rc_pingpong_fork_safe(self):
        self.pingpong("ibv_rc_pingpong", env={"RDMAV_FORK_SAFE": "1"})

    def test_uc_pingpong(self):
        self.pingpong("ibv_uc_pingpong")

    def test_uc_pingpong_events(self):
        self.pingpong("ibv_uc_pingpong", "-e")

    def test_ud_pingpong(self):
        self.pingpong("ibv_ud_pingpong", "-s", "1024")

    def test_ud_pingpong_events(self):
        self.pingpong("ibv_ud_pingpong", "-s", "1024", "-e")

    def test_srq_pingpong(self):
        self.pingpong("ibv_srq_pingpong")

    def test_srq_pingpong_events(self):
        self.pingpong("ibv_srq_pingpong", "-e")

    def test_send_bw_uc(self):
        self.perftest("ib_send_bw", "-c", "UC")

    def test_send_bw_ud(self):
        self.perftest("ib_send_bw", "-c", "UD", "-s", "1024")

    def test_send_bw_srq(self):
        self.perftest("ib_send_bw", "--use-srq", "-q", "4")

    def test_send_bw_rdma_cm(self):
        self.perftest("ib_send_bw", "-R")

    def test_write_bw_qps(self):
        self.perftest("ib_write_bw", "-q", "8")

    def test_atomic_bw(self):
        server = ["ib_atomic_bw", "-d", DEVICE, "-x", str(GID_INDEX), "-F", "-n", "100"]
        self.pair(server, server + [ADDRESS])

    def test_rping(self):
        self.pair(["rping", "-s", "-a", ADDRESS, "-C", "20", "-V"], ["rping", "-c", "-a", ADDRESS, "-C", "20", "-V"])

    def test_ucmatose(self):
        self.pair(["ucmatose", "-c", "4"], ["ucmatose", "-s", ADDRESS, "-c", "4"])

    def test_udaddy(self):
        self.pair(["udaddy", "-c", "2"], ["udaddy", "-s", ADDRESS, "-c", "2"])

    def test_rdma_server(self):
        self.pair(["rdma_server"], ["rdma_client", "-s", ADDRESS])

    def test_rstream(self):
        options = ["-S", "4096", "-C", "20", "-I", "5"]
        self.pair(["rstream", *options], ["rstream", "-s", ADDRESS, *options])
