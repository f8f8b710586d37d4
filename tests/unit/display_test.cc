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
  FILE* out = popen(("exec timeout 60 " MIGR_CTL " --config " + dir + "/none --socket " + socket + " migrate web --to b 2>" + err).c_str(), "r");
  ASSERT_NE(out, nullptr);
  char line[64] = "";
  EXPECT_NE(fgets(line, sizeof line, out), nullptr);
  EXPECT_STREQ(line, "goes on\n");
  const int status = pclose(out);  // no reader any more; and waits for it
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGPIPE);
  std::stringstream said;
  said << std::ifstream(err).rdbuf();
  EXPECT_NE(said.str().find("migrctl: only this display ends, migrd goes on with it"), std::string::npos) << said.str();
  server->Shutdown(std::chrono::system_clock::now());
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace migr::display_test
