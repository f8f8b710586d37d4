// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What becomes of the display of a migration when nobody looks at it any more.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "wire.grpc.pb.h"

namespace migr::display_test {
namespace {

// Its migrations have no end.
class Endless final : public wire::Control::Service {
  grpc::Status Migrate(grpc::ServerContext* ctx, const wire::MigrateRequest*, grpc::ServerWriter<wire::Progress>* to) override {
    wire::Progress p;
    p.set_note("goes on");
    while (!ctx->IsCancelled() && to->Write(p)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return grpc::Status::OK;
  }
};

/// What `migrctl cancel` is told.
class Cancelling final : public wire::Control::Service {
 public:
  bool ends = true, late = false, dies = false;
  wire::CancelRequest asked;

 private:
  grpc::Status Cancel(grpc::ServerContext*, const wire::CancelRequest* r, wire::CancelReply* out) override {
    asked = *r;
    if (dies) return {grpc::StatusCode::UNAVAILABLE, "Socket closed"};
    if (late) return {grpc::StatusCode::FAILED_PRECONDITION, "it is committed already"};
    auto* m = out->mutable_migration();
    m->set_id(0xabc), m->set_container("web"), m->set_source("src"), m->set_destination("dst"), m->set_state("is being migrated to dst");
    out->set_ended(ends);
    return grpc::Status::OK;
  }
};

TEST(Display, OfWhatIsCancelledSaysWhetherAllIsBack) {
  if (geteuid()) GTEST_SKIP() << "not root: migrctl refuses";
  char name[] = "/tmp/display_test.XXXXXX";
  const std::string dir = mkdtemp(name), socket = dir + "/ctl.sock";
  Cancelling migrd;
  grpc::ServerBuilder b;
  b.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
  b.RegisterService(&migrd);
  const auto server = b.BuildAndStart();
  ASSERT_TRUE(server);
  std::string said;
  const auto cancel = [&](const std::string& words) {
    FILE* out = popen(("exec timeout 60 " MIGR_CTL " --socket " + socket + " cancel " + words + " 2>&1").c_str(), "r");
    char all[4096];
    said.assign(all, fread(all, 1, sizeof all, out));
    return WEXITSTATUS(pclose(out));
  };
  EXPECT_EQ(cancel("web"), 0);
  EXPECT_EQ(said, "migration 00000abc of web to dst is cancelled: web goes on running on src\n");
  EXPECT_EQ(migrd.asked.container(), "web");
  EXPECT_EQ(migrd.asked.id(), 0u);
  EXPECT_GT(migrd.asked.wait_ms(), 0u);
  EXPECT_EQ(cancel("00000abc"), 0);
  EXPECT_EQ(migrd.asked.container(), "00000abc") << "a container may be called so";
  EXPECT_EQ(migrd.asked.id(), 0xabcu);
  migrd.ends = false;
  EXPECT_EQ(cancel("web"), 1);
  EXPECT_TRUE(said.starts_with("migrctl: migration 00000abc of web to dst is cancelled, and not all of it is back yet")) << said;
  EXPECT_EQ(cancel("web --json"), 1);
  EXPECT_NE(said.find("\"status\": 1"), std::string::npos) << said;
  migrd.late = true;
  EXPECT_EQ(cancel("web"), 3);
  EXPECT_EQ(said, "migrctl: it is committed already\n");
  migrd.dies = true;
  EXPECT_EQ(cancel("web"), 1) << "it may be cancelled";
  EXPECT_EQ(said, "migrctl: migrd has ended before it answered; it is not known whether migrd has taken the order; see: migrctl recover\n");
  server->Shutdown(std::chrono::system_clock::now());
  std::filesystem::remove_all(dir);
}

// migrctl migrate .. | head -n 1
TEST(Display, ThatNobodyReadsEndsAndSaysSo) {
  if (geteuid()) GTEST_SKIP() << "not root: migrctl refuses";
  char name[] = "/tmp/display_test.XXXXXX";
  const std::string dir = mkdtemp(name), socket = dir + "/ctl.sock", err = dir + "/err";
  Endless migrd;
  grpc::ServerBuilder b;
  b.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
  b.RegisterService(&migrd);
  const auto server = b.BuildAndStart();
  ASSERT_TRUE(server);
  FILE* out = popen(("exec timeout 60 " MIGR_CTL " --socket " + socket + " migrate web --to b 2>" + err).c_str(), "r");
  ASSERT_NE(out, nullptr);
  char line[64] = "";
  EXPECT_NE(fgets(line, sizeof line, out), nullptr);
  EXPECT_STREQ(line, "goes on\n");
  const int status = pclose(out);  // no reader any more; and waits for it
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGPIPE);
  std::stringstream said;
  said << std::ifstream(err).rdbuf();
  EXPECT_NE(said.str().find("migrctl: only this display ends, migrd goes on with it"), std::string::npos) << said.str();
  EXPECT_NE(said.str().find("to take it back: migrctl cancel"), std::string::npos) << said.str();
  server->Shutdown(std::chrono::system_clock::now());
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace migr::display_test
