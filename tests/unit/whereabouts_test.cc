// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Several QPs may have been called by one address: which of them is meant. And what a process hears that asks for one.
#include "agent/whereabouts.h"

#include <gtest/gtest.h>

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "temp_folder.h"

namespace migr::whereabouts_test {
namespace {

const std::string kMine(16, 'm'), kOther(16, 'o'), kThere(16, 't');
const std::set<std::string> kAskers{kMine};

struct Choose : ::testing::Test {
  wire::Whereabouts& add(std::uint32_t pqpn, bool moved = false) {
    auto* w = all.add_found();
    w->set_gid(kThere);
    w->set_pqpn(pqpn);
    w->set_moved(moved);
    return *w;
  }
  static void connect(wire::Whereabouts& w, const std::string& gid, std::uint32_t pqpn) {
    w.set_connected(true);
    w.set_dest_gid(gid);
    w.set_dest_pqpn(pqpn);
  }
  std::uint32_t chosen() {
    const auto* w = choose(all, kAskers, 17);
    return w ? w->pqpn() : 0;
  }
  wire::WhereReply all;
};

TEST_F(Choose, NobodyAmongNone) { EXPECT_EQ(0u, chosen()); }

TEST_F(Choose, WhoIsConnectedToTheAsker) {
  add(30);
  connect(add(31, true), kMine, 17);
  EXPECT_EQ(31u, chosen());
}

TEST_F(Choose, NotWhoIsConnectedElsewhere) {
  connect(add(30), kMine, 18);
  connect(add(31), kOther, 17);
  EXPECT_EQ(0u, chosen());
  add(32, true);
  EXPECT_EQ(32u, chosen());
}

TEST_F(Choose, OfTwoThatWaitTheOneThatWasBornThere) {
  add(30, true);
  add(31);
  EXPECT_EQ(31u, chosen());
}

// The only host that is asked; it knows of none, or cannot look.
struct Asked : ::testing::Test, wire::Partner::Service {
  Asked() {
    grpc::ServerBuilder b;
    b.RegisterService(this);
    server = b.BuildAndStart();
    peers.set_self(server->InProcessChannel({}));
    wire::MovesRequest r;
    auto* m = r.add_moves();
    m->set_instance(std::string(sizeof(Instance), 'i'));
    m->set_birth_gid(kThere);
    m->set_gid(kOther);
    EXPECT_TRUE(directory.put(r));
  }
  ~Asked() override {
    server->Shutdown();
  }
  grpc::Status Where(grpc::ServerContext*, const wire::WhereRequest*, wire::WhereReply*) override { return to_grpc(says); }
  int error_of(const std::string& gid) {
    migr_qp_address named{};
    gid.copy(reinterpret_cast<char*>(named.gid), sizeof named.gid);
    named.qpn = 17;
    Question q;
    q.type = MIGR_MSG_WHERE;
    q.record_size = sizeof named;
    q.records.resize(sizeof named);
    std::memcpy(q.records.data(), &named, sizeof named);
    const auto a = whereabouts.answer(q);
    return a ? 0 : a.error().code;
  }
  static Config config_in(const std::string& dir) {
    Config c;
    c.name = "here";
    c.state_dir = dir;
    return c;
  }
  const TempFolder temp;
  const std::string dir = temp.path;
  const Config config = config_in(dir);
  SessionTable sessions;
  Peers peers{config, pki::Files{}};
  Directory directory{config};
  Numbers numbers{config};
  Whereabouts whereabouts{config, sessions, peers, directory, numbers};
  Status says;
  std::unique_ptr<grpc::Server> server;
};

TEST_F(Asked, NobodyKnowsIt) {
  EXPECT_EQ(error_of(kThere), ENOENT);
  says = Error{EPROTONOSUPPORT, "played"};
  EXPECT_EQ(error_of(kMine), ENOENT) << "nothing has moved there";
}

TEST_F(Asked, AHostThatCouldNotLookMayHaveIt) {
  says = Error{EPROTONOSUPPORT, "played"};
  EXPECT_EQ(error_of(kThere), EREMOTEIO);
}

}  // namespace
}  // namespace migr::whereabouts_test
