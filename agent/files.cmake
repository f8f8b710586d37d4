# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
# Files of agent/ that are linked without the rest, too: what all targets of libFuzzer (tests/fuzz, a project of its own) have, and what its target
# `calls` has besides; tests/faults has both.
set(agent_files command mappings process process_session stack_walk thread_scan file_tree failover/link_table failover/link_records)
set(service_files authorization bare build_id certificates config criu_image destination_host directory facts fault host_service log netlink_exchange
  numbers page_images partner_host peer_link pki processor replay restore_socket room runc runtime standard_streams tcp_repair text tracking traffic whereabouts failover/peer_directory
  failover/port_watch)
