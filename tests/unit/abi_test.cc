// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The ABI's layouts are what an installed older or newer peer expects: sizes are pinned here.
#include <gtest/gtest.h>

#include <cstddef>

#include "migr/ahead.h"
#include "migr/links_wire.h"
#include "migr/proc_wire.h"
#include "uapi/migr.h"

TEST(Abi, KernelRecordsHaveTheirPinnedSizes) {
  EXPECT_EQ(sizeof(migr_ioc_attach), 16u);
  EXPECT_EQ(sizeof(migr_key_entry), 8u);
  EXPECT_EQ(sizeof(migr_mr_rec), 56u);
  EXPECT_EQ(sizeof(migr_cq_rec), 32u);
  EXPECT_EQ(sizeof(migr_ah_attr), 56u);
  EXPECT_EQ(sizeof(migr_qp_rec) % 8, 0u);
  EXPECT_EQ(sizeof(migr_ctx_rec) % 8, 0u);
}

TEST(Abi, ProcessRecordsHaveNoImplicitPadding) {
  EXPECT_EQ(sizeof(migr_msg), 64u + MIGR_PROC_TEXT_MAX + 0u);
  EXPECT_EQ(offsetof(migr_msg, arg) % 8, 0u);
  EXPECT_EQ(sizeof(migr_fd_desc), 56u);
  EXPECT_EQ(sizeof(migr_key_map), 24u);
  EXPECT_EQ(sizeof(migr_qp_connect), 48u);
  EXPECT_EQ(sizeof(migr_handle_map), 48u);
}

TEST(Abi, WhatIsLeftForThePluginHasNoImplicitPadding) {
  EXPECT_EQ(sizeof(migr_ahead), 48u);
  EXPECT_EQ(sizeof(migr_ahead_mr), 144u);
  EXPECT_EQ(offsetof(migr_ahead_mr, status), 4u) << "MIGR_AHEAD_CODE knows where it is";
  EXPECT_EQ(offsetof(migr_ahead_mr, cmd), 8u) << "MIGR_AHEAD_CODE knows where it is";
}

TEST(Abi, LinkRecordsHaveNoImplicitPadding) {
  EXPECT_EQ(sizeof(migr_links_msg), 48u + MIGR_LINKS_TEXT_MAX);
  EXPECT_EQ(sizeof(migr_links_hello), 24u);
  EXPECT_EQ(sizeof(migr_links_link), 112u + MIGR_LINKS_WHY_MAX);
  EXPECT_EQ(sizeof(migr_links_name), 24u);
  EXPECT_EQ(sizeof(migr_links_path), 40u);
  EXPECT_EQ(sizeof(migr_links_vqp), 48u + MIGR_LINKS_MAX_LINKS * sizeof(migr_links_path));
  EXPECT_EQ(sizeof(migr_links_found), sizeof(migr_links_vqp) + 24 + MIGR_LINKS_MAX_LINKS * 16 + 32);
  EXPECT_EQ(sizeof(migr_links_channel), 64u);
  EXPECT_EQ(sizeof(migr_links_vqp_state), 40u + MIGR_LINKS_WHY_MAX);
  EXPECT_EQ(sizeof(migr_links_switch), 104u);
  EXPECT_EQ(sizeof(migr_links_port), 104u);
}

TEST(Abi, TheLargestLinkMessageFitsAPacket) {
  EXPECT_LE(sizeof(migr_links_msg) + MIGR_LINKS_MAX_RECORDS * sizeof(migr_links_found), MIGR_LINKS_PACKET_BYTES);
}

TEST(Abi, ATagThatIsWrongStaysWrongAfterTranslation) {
  const std::uint32_t vkey = 0x1234c5, pkey = 0x9988aa;
  const std::uint32_t entry = pkey ^ (vkey & 0xff);
  EXPECT_EQ(entry ^ (vkey & 0xff), pkey);
  EXPECT_NE(entry ^ ((vkey ^ 1) & 0xff), pkey);
}
