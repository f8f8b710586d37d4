// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The coordinator's links, to played migrds: of another version, silent, with much to say.
#include "agent/links.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "agent/file_tree.h"
#include "agent/limits.h"
#include "temp_folder.h"

namespace migr::links_rpc_test {
namespace {

struct FakeHost final : wire::Host::Service {
  std::uint32_t wire = kWireVersion;
  int asked = 0;
  grpc::Status Version(grpc::ServerContext*, const wire::Empty*, wire::VersionReply* out) override {
    asked++;
    out->set_wire(wire);
    return grpc::Status::OK;
  }
};

struct FakePartner final : wire::Partner::Service {
  bool has_any = true;
  std::string busy;
  int keys = 0;
  grpc::Status Find(grpc::ServerContext*, const wire::FindRequest*, wire::FindReply* out) override {
    if (has_any) out->add_qps()->set_pqpn(7);
    if (!busy.empty()) out->add_busy()->set_who(busy);
    return grpc::Status::OK;
  }
  grpc::Status Keys(grpc::ServerContext*, const wire::KeysRequest* r, wire::KeysReply*) override {
    keys = r->keys(0).vrkey_size();
    return grpc::Status::OK;
  }
};

struct FakeDestination final : wire::Destination::Service {
  static constexpr int kMany = 1'000'000;
  grpc::Status Rebind(grpc::ServerContext*, const wire::Migration*, wire::CommitReply* out) override {
    auto* k = out->add_keys();
    for (std::uint32_t i = 0; i < kMany; i++) k->add_vrkey(i), k->add_prkey(~i);
    return grpc::Status::OK;
  }
  // Never has enough.
  grpc::Status Upload(grpc::ServerContext* ctx, grpc::ServerReader<wire::UploadChunk>* reader, wire::UploadReply*) override {
    wire::UploadChunk c;
    while (reader->Read(&c)) {
    }
    while (!ctx->IsCancelled()) usleep(10'000);
    return grpc::Status::CANCELLED;
  }
  grpc::Status Prepare(grpc::ServerContext*, grpc::ServerReader<wire::PrepareChunk>* reader, wire::PrepareReply*) override {
    wire::PrepareChunk c;
    ends = 0;
    for (bool tells = false; reader->Read(&c); prepared.insert(c.file().name())) {
      EXPECT_EQ(ends, 0) << "nothing comes after it";
      tells = tells || c.tells_last();
      ends += tells && c.last();
    }
    return grpc::Status::OK;
  }
  grpc::Status Check(grpc::ServerContext*, const wire::CheckRequest* r, wire::CheckReply* out) override {
    out->set_bundle_shared(has_mark(r->bundle(), r->bundle_mark()) && here == r->bundle());
    has_address = r->has_address();
    return grpc::Status::OK;
  }
  std::string here;  // the folder that it has, too
  bool has_address = false;
  int asked_for_changes = 0;
  int ends = 0;  // that were told
  std::set<std::string> prepared, named, changed;
  grpc::Status UploadChanges(grpc::ServerContext*, grpc::ServerReader<wire::ChangesChunk>* reader, wire::UploadReply* out) override {
    wire::ChangesChunk c;
    bool all = false, tells = false;
    asked_for_changes++;
    ends = 0;
    while (reader->Read(&c)) {
      EXPECT_EQ(ends, 0) << "nothing comes after it";
      tells = tells || c.tells_last();
      ends += tells && c.last();
      EXPECT_FALSE(all && c.names_size());
      EXPECT_FALSE(!all && c.has_file());
      for (const auto& n : c.names()) named.insert(n.name());
      all = all || c.all_named();
      if (c.has_file()) changed.insert(c.file().name());
      out->set_bytes(out->bytes() + c.file().data().size());
    }
    return grpc::Status::OK;
  }
  grpc::Status Commit(grpc::ServerContext* ctx, const wire::Migration*, wire::Empty*) override {
    while (!ctx->IsCancelled()) usleep(10'000);
    return grpc::Status::CANCELLED;
  }
};

struct LinksToPeers : ::testing::Test {
  void SetUp() override {
    grpc::ServerBuilder b;
    b.RegisterService(&host);
    b.RegisterService(&partner);
    b.RegisterService(&destination);
    set_bulk(b);
    server = b.BuildAndStart();
    grpc::ChannelArguments bulk;
    set_bulk(bulk);
    channel = server->InProcessChannel(bulk);
  }
  void TearDown() override { server->Shutdown(); }
  FakeHost host;
  FakePartner partner;
  FakeDestination destination;
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<grpc::Channel> channel;
};

TEST_F(LinksToPeers, APartnerOfAnotherVersionIsRefusedByName) {
  RpcPartner link(channel, "peer");
  EXPECT_TRUE(link.find({}));
  host.wire = kWireVersion + 1;
  const auto found = link.find({});
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, EBUSY);
  const std::string said = "migrd on the partner's host peer: version " + std::to_string(kWireVersion) + " here, " + std::to_string(kWireVersion + 1) + " there";
  EXPECT_TRUE(found.error().text.starts_with(said)) << found.error().text;
}

TEST_F(LinksToPeers, WhoHasNoPartnerMayHaveAnyVersion) {
  host.wire = kWireVersion + 1;
  partner.has_any = false;
  EXPECT_TRUE(RpcPartner(channel, "peer").find({}));
  EXPECT_EQ(host.asked, 0);
}

TEST_F(LinksToPeers, NamesMayBeOfAnyBytes) {
  partner.busy = "process 7 (caf\xc3) on peer";
  const auto found = RpcPartner(channel, "peer").find({});
  ASSERT_TRUE(found) << found.error().text;
  EXPECT_EQ(found->busy(0).who(), partner.busy);
}

TEST_F(LinksToPeers, KeysOfAMillionRegionsGetThrough) {
  const auto reply = RpcDestination(channel, "dst").rebind(1);
  ASSERT_TRUE(reply) << reply.error().text;
  ASSERT_EQ(reply->keys_size(), 1);
  EXPECT_EQ(reply->keys(0).prkey_size(), FakeDestination::kMany);
  wire::KeysRequest r;
  *r.mutable_keys() = reply->keys();
  const auto s = RpcPartner(channel, "peer").keys(r);
  ASSERT_TRUE(s) << s.error().text;
  EXPECT_EQ(partner.keys, FakeDestination::kMany);
}

TEST_F(LinksToPeers, SilenceIsSaidInOurOwnWords) {
  kCommitMs = 200;
  const auto s = RpcDestination(channel, "dst").commit(1);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
  EXPECT_TRUE(unreachable(s.error()));
  EXPECT_EQ(s.error().text, "dst: no answer within the limit for it; if it only needs longer, raise \"commit_ms\" in \"limits\" of migrd.json");
  EXPECT_EQ(from_grpc({grpc::StatusCode::DEADLINE_EXCEEDED, ""}, "dst").error().text, "dst: no answer within the limit for it; if it only needs longer: \"limits\" in migrd.json (migrd(8))");
}

/// With a bundle that it may write to.
struct LinksOfAContainer : LinksToPeers {
  void SetUp() override {
    LinksToPeers::SetUp();
    std::filesystem::create_directories(bundle + "/rootfs");
    std::filesystem::create_directories(images);
    std::ofstream(bundle + "/config.json") << R"({"root": {"path": "rootfs"}})";
    h.set_bundle(bundle);
  }
  void TearDown() override {
    LinksToPeers::TearDown();
  }
  const TempFolder temp;
  const std::string dir = temp.path, bundle = dir + "/bundle", images = dir + "/images";
  wire::PrepareHeader h;
  Sent sent;
};

TEST_F(LinksOfAContainer, WhatAContainerMayWriteToIsSentAgain) {
  std::filesystem::create_directories(bundle + "/rootfs/d");
  std::ofstream(bundle + "/rootfs/gone") << "x";
  RpcDestination link(channel, "dst");
  auto prepared = link.prepare(h, images, sent);
  ASSERT_TRUE(prepared) << prepared.error().text;
  EXPECT_TRUE(destination.prepared.contains("rootfs/gone"));
  EXPECT_EQ(destination.ends, 1);
  ASSERT_TRUE(link.bundle_changes());
  std::filesystem::remove(bundle + "/rootfs/gone");
  std::ofstream(bundle + "/rootfs/d/f") << "new";
  const auto s = link.upload_changes(1, sent);
  EXPECT_TRUE(s) << s.error().text;
  EXPECT_EQ(destination.named, (std::set<std::string>{"d", "d/f"}));
  EXPECT_TRUE(destination.changed.contains("d/f"));
  EXPECT_EQ(destination.ends, 1);
  std::ofstream(bundle + "/config.json") << R"({"root": {"path": "rootfs", "readonly": true}})";
  ASSERT_TRUE(link.prepare(h, images, sent));
  EXPECT_FALSE(link.bundle_changes());
}

// A process without a container has none, neither where it ran nor in what is stored of it.
TEST_F(LinksOfAContainer, WhoHasNoBundleSendsNone) {
  std::ofstream(images + "/migr.img") << "x";
  for (const auto& of : {std::string(), dir + "/stored/bundle"}) {
    destination.prepared.clear();
    const auto prepared = RpcDestination(channel, "dst", of).prepare(wire::PrepareHeader(), images, sent);
    EXPECT_TRUE(prepared) << prepared.error().text;
    EXPECT_EQ(destination.prepared, (std::set<std::string>{"", "migr.img"}));
  }
}

// Each of these files has less than it says, as one that becomes shorter. What is stored is nobody's to write to.
TEST_F(LinksOfAContainer, WhatChangesBesideARootThatCannotBeWrittenToFailsNothing) {
  const std::string changes = "/sys/devices/virtual/net/lo/statistics";
  if (!std::filesystem::exists(changes)) GTEST_SKIP() << "no " << changes;
  h.set_bundle(changes);
  RpcDestination link(channel, "dst");
  const auto prepared = link.prepare(h, images, sent);
  ASSERT_TRUE(prepared) << prepared.error().text;
  EXPECT_FALSE(link.bundle_changes());
  EXPECT_TRUE(destination.prepared.contains("rx_bytes"));
  const auto stored = RpcDestination(channel, "dst", changes).prepare(h, images, sent);
  ASSERT_FALSE(stored);
  EXPECT_EQ(stored.error().code, EIO) << stored.error().text;
}

TEST_F(LinksOfAContainer, ABundleThatBothHostsHaveIsNotSent) {
  std::ofstream(bundle + "/.migr-mark-1") << "of a migrd that ended";
  std::filesystem::last_write_time(bundle + "/.migr-mark-1", std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
  std::ofstream(bundle + "/.migr-mark-2") << "of a question that is under way";
  std::ofstream(images + "/migr.img") << "x";
  wire::CheckRequest check;
  check.set_bundle(bundle);
  for (const bool shared : {true, false}) {
    RpcDestination link(channel, "dst");
    destination.here = shared ? bundle : "elsewhere";
    destination.prepared.clear();
    ASSERT_TRUE(link.check(check));
    EXPECT_TRUE(std::filesystem::exists(bundle + "/config.json"));
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(bundle), {}), 3) << "no mark of ours is left";
    EXPECT_TRUE(std::filesystem::exists(bundle + "/.migr-mark-2"));
    ASSERT_TRUE(link.prepare(h, images, sent));
    EXPECT_TRUE(destination.prepared.contains("migr.img"));
    EXPECT_EQ(destination.prepared.contains("config.json"), !shared);
    const auto s = link.upload_changes(1, sent);
    EXPECT_TRUE(s) << s.error().text;
    EXPECT_EQ(destination.asked_for_changes, shared ? 0 : 1);
  }
}

TEST_F(LinksOfAContainer, TheDestinationIsToldOfAnAddress) {
  wire::CheckRequest running, stored;
  running.set_bundle(bundle);
  stored.set_bundle("/where/it/is/to/be");
  const auto told = [&](const std::string& of, const wire::CheckRequest& r) {
    EXPECT_TRUE(RpcDestination(channel, "dst", of).check(r));
    return destination.has_address;
  };
  EXPECT_FALSE(told("", running) || told(bundle, stored) || told("", wire::CheckRequest()));
  std::ofstream(bundle + "/config.json") << R"({"annotations": {"org.migr.net.ip": "10.0.0.1/24"}})";
  EXPECT_TRUE(told("", running) && told(bundle, stored));
}

TEST_F(LinksToPeers, ASlowUploadSaysHowFarItGot) {
  kUploadMs = 500;
  char dir[] = "/tmp/links_rpc_test.XXXXXX";
  ASSERT_NE(mkdtemp(dir), nullptr);
  std::ofstream(std::string(dir) + "/core.img") << std::string(3'000'000, 'x');
  Sent sent;
  const auto s = RpcDestination(channel, "dst").upload(1, dir, 0, all_written, sent);
  std::filesystem::remove_all(dir);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, ETIMEDOUT);
  EXPECT_TRUE(s.error().text.starts_with("dst: ")) << s.error().text;
  EXPECT_NE(s.error().text.find(" MB were sent in "), std::string::npos) << s.error().text;
  EXPECT_TRUE(s.error().text.ends_with(" s, and that was not all; if the network has no more, raise upload_ms, and phase_ms above it, in \"limits\" of migrd.json here")) << s.error().text;
}

}  // namespace
}  // namespace migr::links_rpc_test
