// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What doctor says of given facts: nothing of hosts that are right; of one thing that is wrong, that, and what to do.
#include "agent/doctor.h"

#include <gtest/gtest.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "agent/kernel_record.h"
#include "agent/pki.h"
#include "libmigr/links/config.h"

namespace migr::doctor_test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kNow = 1'800'000'000, kDay = 24 * 3600;
constexpr std::uint32_t kActive = 4, kDown = 1, kMtu1024 = 3, kMtu4096 = 5;
const std::string kIpv4 = std::string(10, '\0') + "\xff\xff\x0a\x4d\x0a\x01", kLinkLocal = std::string("\xfe\x80") + std::string(13, '\0') + "\x01";

wire::HostFacts good(const std::string& name = "src") {
  wire::HostFacts f;
  auto* v = f.mutable_version();
  v->set_name(name), v->set_release("1"), v->set_wire(2), v->set_abi(3), v->set_proc(4);
  f.set_kernel("6.1.0-56-amd64");
  f.mutable_library()->set_path("/usr/lib/migr/libmigr.so");
  f.mutable_criu()->set_path("criu"), f.mutable_criu()->set_version("3.17.1");
  f.mutable_plugin()->set_path("/usr/lib/criu/migr_plugin.so");
  f.mutable_runc()->set_path("runc");
  f.mutable_net_hook()->set_path("/usr/lib/migr/migr-net");
  f.mutable_nft()->set_path("nft");
  f.mutable_cgroups()->set_path("/sys/fs/cgroup");
  for (const char* peer : {"src", "dst", "p"}) f.add_peers(peer);
  auto* c = f.mutable_certificate();
  c->set_folder("/etc/migr/pki"), c->set_subject(name), c->set_begins_s(kNow - kDay), c->set_ends_s(kNow + 300 * kDay), c->set_ca_ends_s(kNow + 900 * kDay);
  c->set_of_ca(true), c->set_of_key(true), c->set_of_host(true);
  auto* d = f.add_devices();
  d->set_name("rxe0"), d->set_driver(RDMA_DRIVER_RXE);
  auto* p = d->add_ports();
  p->set_port(1), p->set_state(kActive), p->set_mtu(kMtu1024), p->set_netdev("eth1");
  auto* g = d->add_gids();
  g->set_device("rxe0"), g->set_port(1), g->set_roce_v2(true), g->set_gid(kIpv4);
  f.mutable_room()->set_folder("/var/lib/migr"), f.mutable_room()->set_free_bytes(10ull << 30);
  return f;
}

PeerAnswer answer_of(const wire::HostFacts& f, std::int64_t ahead_ms = 0) { return {"dst", "dst:7471", f, ahead_ms}; }

std::string text_of(const std::vector<Finding>& all) { return doctor_text(all, false); }

/// The only ones that are not ok.
std::vector<Finding> wrong(const std::vector<Finding>& all) {
  std::vector<Finding> out;
  for (const auto& f : all)
    if (f.health != Health::kOk) out.push_back(f);
  return out;
}

TEST(Doctor, HostsThatAreRightAreOk) {
  EXPECT_TRUE(wrong(judge_host(good(), kNow)).empty()) << text_of(judge_host(good(), kNow));
  const auto peer = judge_peer(good(), answer_of(good("dst")), kNow);
  EXPECT_TRUE(wrong(peer).empty()) << text_of(peer);
  EXPECT_EQ(health_of(peer), Health::kOk);
  auto older = good("dst");  // does not know of it
  older.clear_net_hook();
  older.clear_nft();
  older.clear_cgroups();
  older.clear_peers();
  EXPECT_TRUE(wrong(judge_peer(good(), answer_of(older), kNow)).empty());
  for (const auto& f : peer) EXPECT_EQ(f.advice, "") << f.check;
}

TEST(Doctor, TheNewestKernelIsThatOfDkms) {
  auto f = good();
  for (const char* of : {"6.1.0", "6.12.0", "6.12.48+deb13-amd64"}) {
    f.set_kernel(of);
    EXPECT_TRUE(wrong(judge_host(f, kNow)).empty()) << of;
  }
  std::ifstream in(MIGR_SOURCE "/packaging/debian/migr-dkms.dkms");
  const std::string dkms{std::istreambuf_iterator<char>(in), {}};
  EXPECT_NE(dkms.find("\"^6\\.([1-9]|1[0-2])[.-]\""), std::string::npos) << "other ones than doctor says";
}

TEST(Doctor, ModprobeIsForAModuleThatIsThere) {
  char name[] = "/tmp/doctor_test.XXXXXX";
  const std::string modules = mkdtemp(name), dep = modules + "/6.1.0/modules.dep";
  EXPECT_NE(how_to_load("6.1.0", modules).find("none for Linux 6.1.0; dkms status"), std::string::npos);
  fs::create_directories(modules + "/6.1.0");
  std::ofstream(dep) << "kernel/ib_uverbs.ko: kernel/ib_core.ko\nkernel/x.ko: updates/dkms/migr.ko\n";
  EXPECT_NE(how_to_load("6.1.0", modules).find("none for"), std::string::npos);
  std::ofstream(dep) << "updates/dkms/migr.ko.xz: kernel/ib_uverbs.ko kernel/ib_core.ko\n";
  EXPECT_EQ(how_to_load("6.1.0", modules), "; load it with: modprobe migr");
  EXPECT_NE(how_to_load("6.12.0", modules).find("none for Linux 6.12.0"), std::string::npos);
  fs::remove_all(modules);
}

struct Case {
  const char* name;
  std::function<void(wire::HostFacts&)> spoil;
  const char* check;
  Health health;
  const char* found;
  const char* advice;
};
void expect_alone(const std::vector<Finding>& all, const std::string& host, const Case& c) {
  const auto bad = wrong(all);
  ASSERT_EQ(bad.size(), 1u) << text_of(all);
  EXPECT_EQ(bad[0].host, host);
  EXPECT_EQ(bad[0].check, c.check);
  EXPECT_EQ(bad[0].health, c.health);
  EXPECT_NE(bad[0].found.find(c.found), std::string::npos) << bad[0].found;
  EXPECT_NE(bad[0].advice.find(c.advice), std::string::npos) << bad[0].advice;
}

struct OneThingIsWrong : ::testing::TestWithParam<Case> {};

TEST_P(OneThingIsWrong, AndIsSaidAlone) {
  auto f = good();
  GetParam().spoil(f);
  expect_alone(judge_host(f, kNow), "src", GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Doctor, OneThingIsWrong,
    ::testing::Values(
        Case{"kernel", [](auto& f) { f.set_kernel("5.10.0"); }, "kernel", Health::kFailed, "5.10", "6.1"},
        Case{"kernel_new", [](auto& f) { f.set_kernel("6.13.0"); }, "kernel", Health::kWarning, "6.13.0", "6.12"},
        Case{"module", [](auto& f) { f.set_module_error("migr.ko is not loaded"); }, "module", Health::kFailed, "not loaded", "started again"},
        Case{"library", [](auto& f) { f.mutable_library()->set_error("no /x"); }, "library", Health::kFailed, "no /x", "LD_PRELOAD"},
        Case{"criu", [](auto& f) { f.mutable_criu()->set_error("cannot run criu"); }, "criu", Health::kFailed, "cannot run", "install"},
        Case{"criu_old", [](auto& f) { f.mutable_criu()->set_version("3.16"); }, "criu", Health::kFailed, "3.16", "3.17"},
        Case{"plugin", [](auto& f) { f.mutable_plugin()->set_error("no migr_plugin.so"); }, "plugin", Health::kFailed, "no migr_plugin.so", "criu_libs"},
        Case{"runc", [](auto& f) { f.mutable_runc()->set_error("runc knows no partial-restore"); }, "runc", Health::kFailed, "partial-restore", "migr's runc"},
        Case{"net_hook", [](auto& f) { f.mutable_net_hook()->set_error("/x is no program"); }, "net_hook", Health::kFailed, "no program", "migr-net"},
        Case{"nft", [](auto& f) { f.mutable_nft()->set_error("cannot run nft"); }, "nft", Health::kWarning, "cannot run nft", "nftables"},
        Case{"cgroups", [](auto& f) { f.mutable_cgroups()->set_error("not the unified hierarchy"); }, "cgroups", Health::kFailed, "not the unified", "systemd.unified_cgroup_hierarchy=1"},
        Case{"no_net_hook", [](auto& f) { f.mutable_net_hook()->clear_path(); }, "net_hook", Health::kWarning, "not set", "if there are such, say in migrd.json"},
        Case{"no_key", [](auto& f) { f.mutable_certificate()->set_error("no host.key"); }, "certificate", Health::kFailed, "no host.key", "/etc/migr/pki"},
        Case{"expired", [](auto& f) { f.mutable_certificate()->set_ends_s(kNow); }, "certificate", Health::kFailed, "it expired", "pki host"},
        Case{"expires", [](auto& f) { f.mutable_certificate()->set_ends_s(kNow + 30 * kDay - 1); }, "certificate", Health::kWarning, "in 29 days", "pki host"},
        Case{"ca_expires", [](auto& f) { f.mutable_certificate()->set_ca_ends_s(kNow + kDay); }, "certificate", Health::kWarning, "the CA expires", "new CA"},
        Case{"not_yet", [](auto& f) { f.mutable_certificate()->set_begins_s(kNow + 1); }, "certificate", Health::kFailed, "not valid before", "clock"},
        Case{"other_ca", [](auto& f) { f.mutable_certificate()->set_of_ca(false); }, "certificate", Health::kFailed, "not signed", "pki host"},
        Case{"other_key", [](auto& f) { f.mutable_certificate()->set_of_key(false); }, "certificate", Health::kFailed, "do not belong", "pki host"},
        Case{"other_host", [](auto& f) { f.mutable_certificate()->set_of_host(false), f.mutable_certificate()->set_subject("x"); }, "certificate", Health::kFailed, "for 'x'", "pki host"},
        Case{"no_device", [](auto& f) { f.clear_devices(); }, "rdma", Health::kFailed, "no RDMA device", "rdma link add"},
        Case{"device", [](auto& f) { f.mutable_devices(0)->set_error("no uverbs"); }, "rdma rxe0", Health::kFailed, "no uverbs", "ib_uverbs"},
        Case{"port_down", [](auto& f) { f.mutable_devices(0)->mutable_ports(0)->set_state(kDown); }, "rdma rxe0/1", Health::kFailed, "no other port", "ip link set eth1 up"},
        Case{"second_port_down",
             [](auto& f) {
               *f.add_devices() = f.devices(0);
               f.mutable_devices(1)->set_name("rxe1"), f.mutable_devices(1)->mutable_ports(0)->set_state(kDown);
             },
             "rdma rxe1/1", Health::kWarning, "down", "ip link set"},
        Case{"gid", [](auto& f) { f.mutable_devices(0)->mutable_gids(0)->set_roce_v2(false); }, "rdma rxe0/1", Health::kFailed, "no RoCE v2 GID", "address"},
        Case{"links", [](auto& f) { f.mutable_links()->set_path("/x"), f.mutable_links()->set_error("no JSON"); }, "links", Health::kFailed, "no JSON", "backup"},
        Case{"links_missing", [](auto& f) { f.mutable_links()->set_path("/x"), f.mutable_links()->add_missing("link 1: no RDMA device rxe9"); }, "links", Health::kWarning, "rxe9", "right in /x"},
        Case{"links_without_effect", [](auto& f) { f.mutable_links()->set_path("/x"), f.mutable_links()->add_missing("fewer than two devices: nothing has a backup"); }, "links", Health::kWarning, "two devices", "into /x"},
        Case{"another_family", [](auto& f) { f.mutable_devices(0)->set_driver(RDMA_DRIVER_MLX5); }, "rdma rxe0", Health::kWarning,
             "driven by mlx5: programs on it can neither be moved nor backed up by links", "man 7 migr-limits"},
        Case{"no_room", [](auto& f) { f.mutable_room()->set_lacks("1 MB are free"); }, "room", Health::kFailed, "1 MB", "state_dir"},
        Case{"little_room", [](auto& f) { f.mutable_room()->set_free_bytes(100 << 20); }, "room", Health::kWarning, "100 MB", "free some"}),
    [](const auto& i) { return i.param.name; });

struct PeerDiffers : ::testing::TestWithParam<Case> {};

TEST_P(PeerDiffers, AndThatIsSaidAlone) {
  auto there = good("dst");
  GetParam().spoil(there);
  expect_alone(judge_peer(good(), answer_of(there), kNow), "dst", GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Doctor, PeerDiffers,
    ::testing::Values(
        Case{"itself", [](auto& f) { f.mutable_plugin()->set_error("no migr_plugin.so"); }, "plugin", Health::kFailed, "no migr_plugin.so", "criu_libs"},
        Case{"wire", [](auto& f) { f.mutable_version()->set_wire(9); }, "versions", Health::kFailed, "migrd version 2 here, 9 there", "same release"},
        Case{"abi", [](auto& f) { f.mutable_version()->set_abi(9); }, "versions", Health::kFailed, "migr.ko version 3 here, 9 there", "same release"},
        Case{"proc", [](auto& f) { f.mutable_version()->set_proc(9); }, "versions", Health::kFailed, "libmigr version 4 here, 9 there", "same release"},
        Case{"release", [](auto& f) { f.mutable_version()->set_release("2"); }, "versions", Health::kWarning, "release 1 here, 2 there", "same release"},
        Case{"peers", [](auto& f) { f.mutable_peers()->RemoveLast(); }, "peers", Health::kWarning, "does not know p", "add them to the \"peers\""},
        Case{"here", [](auto& f) { f.clear_peers(), f.add_peers("p"); }, "peers", Health::kWarning, "does not know src", "add them to the \"peers\""},
        Case{"criu", [](auto& f) { f.mutable_criu()->set_version("4.0"); }, "versions", Health::kWarning, "CRIU 3.17.1 here, 4.0 there", "same CRIU"},
        Case{"mtu", [](auto& f) { f.mutable_devices(0)->mutable_ports(0)->set_mtu(kMtu4096); }, "path rxe0/1", Health::kFailed, "MTU 1024 here, 4096 there", "ip link set eth1 mtu"},
        Case{"family", [](auto& f) { f.mutable_devices(0)->mutable_gids(0)->set_gid(kLinkLocal); }, "path rxe0/1", Health::kWarning, "another family", "addresses"}),
    [](const auto& i) { return i.param.name; });

TEST(Doctor, TheOnlyDeviceThereIsComparedWhateverItsName) {
  auto there = good("dst");
  there.mutable_devices(0)->set_name("mlx5_0");
  EXPECT_TRUE(wrong(judge_peer(good(), answer_of(there), kNow)).empty());
  there.mutable_devices(0)->mutable_ports(0)->set_mtu(kMtu4096);
  EXPECT_EQ(health_of(judge_peer(good(), answer_of(there), kNow)), Health::kFailed);
}

TEST(Doctor, WhatDoesNotArriveIsAFailure) {
  auto there = answer_of(good("dst"));
  there.tried = paths_between(good(), *there.facts);
  ASSERT_EQ(there.tried.size(), 1u);
  EXPECT_EQ(there.tried[0].path.from, kIpv4);
  EXPECT_TRUE(wrong(judge_peer(good(), there, kNow)).empty());
  there.tried[0].result.error = "transport retry counter exceeded";
  const auto all = wrong(judge_peer(good(), there, kNow));
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].check, "path rxe0/1");
  EXPECT_EQ(all[0].health, Health::kFailed);
  EXPECT_NE(all[0].found.find("1024 bytes at once between 10.77.10.1 and 10.77.10.1 do not arrive: transport retry"), std::string::npos) << all[0].found;
  EXPECT_NE(all[0].advice.find("UDP port 4791"), std::string::npos);
  there.tried[0].result.why_not = "no device";
  EXPECT_TRUE(wrong(judge_peer(good(), there, kNow)).empty());
}

TEST(Doctor, ThePathThatIsTriedIsBetweenTheNearestGids) {
  auto here = good(), there = good("dst");
  const auto add = [](wire::HostFacts& f, const std::string& gid) {
    auto* g = f.mutable_devices(0)->add_gids();
    g->set_device("rxe0"), g->set_port(1), g->set_roce_v2(true), g->set_gid(gid);
  };
  std::string far = kIpv4, near = kIpv4;
  far[13] = 9;
  near[15] = 7;
  here.mutable_devices(0)->mutable_gids(0)->set_gid(kLinkLocal);
  add(here, kIpv4);
  there.mutable_devices(0)->mutable_gids(0)->set_gid(kLinkLocal);
  add(there, far);
  add(there, near);
  const auto paths = paths_between(here, there);
  ASSERT_EQ(paths.size(), 1u);
  EXPECT_EQ(paths[0].path.from, kIpv4);
  EXPECT_EQ(paths[0].path.to, near);
  there.mutable_devices(0)->mutable_ports(0)->set_state(kDown);
  EXPECT_TRUE(paths_between(here, there).empty());
}

TEST(Doctor, AnotherProcessorIsAWarning) {
  auto here = good(), there = good("dst");
  here.add_instructions("avx512f"), here.add_instructions("sse2");
  EXPECT_TRUE(wrong(judge_peer(here, answer_of(there), kNow)).empty()) << "not known there";
  there.add_instructions("avx512f"), there.add_instructions("sse2");
  EXPECT_TRUE(wrong(judge_peer(here, answer_of(there), kNow)).empty());
  there.set_instructions(0, "sse4a");
  const auto bad = wrong(judge_peer(here, answer_of(there), kNow));
  ASSERT_EQ(bad.size(), 1u);
  EXPECT_EQ(bad[0].check, "processor");
  EXPECT_EQ(bad[0].health, Health::kWarning);
  EXPECT_EQ(bad[0].found, "lacks avx512f; has more than here: sse4a");
}

TEST(Doctor, ADeviceThatThePeerLacksIsAWarning) {
  auto here = good();
  *here.add_devices() = here.devices(0);
  here.mutable_devices(1)->set_name("rxe1");
  auto there = here;
  there.mutable_version()->set_name("dst");
  there.mutable_devices(0)->set_name("other");
  const auto bad = wrong(judge_peer(here, answer_of(there), kNow));
  ASSERT_EQ(bad.size(), 1u);
  EXPECT_EQ(bad[0].check, "rdma rxe0");
  EXPECT_EQ(bad[0].health, Health::kWarning);
}

TEST(Doctor, ClocksMayDifferByASecond) {
  for (const int ms : {-1000, 1000}) EXPECT_TRUE(wrong(judge_peer(good(), answer_of(good("dst"), ms), kNow)).empty()) << ms;
  for (const int ms : {-1001, 1001, 90'000}) {
    const auto bad = wrong(judge_peer(good(), answer_of(good("dst"), ms), kNow));
    ASSERT_EQ(bad.size(), 1u) << ms;
    EXPECT_EQ(bad[0].check, "clock");
    EXPECT_EQ(bad[0].health, Health::kWarning);
    EXPECT_NE(bad[0].found.find(ms < 0 ? "behind ours" : "ahead of ours"), std::string::npos) << bad[0].found;
  }
}

TEST(Doctor, APeerThatDoesNotAnswerHasOneFinding) {
  const auto say = [](int code, const char* text) {
    auto all = judge_peer(good(), {"dst", "dst:7471", Error{code, text}, 0}, kNow);
    EXPECT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].health, Health::kFailed);
    return all[0].advice;
  };
  EXPECT_NE(say(EHOSTUNREACH, "dst: Connection refused").find("start it on dst"), std::string::npos);
  EXPECT_NE(say(EHOSTUNREACH, "dst: Ssl handshake failed").find("certificates of the same CA"), std::string::npos);
  {
    const auto refused = judge_peer(good(), {"dst", "dst:7471", Error{EPERM, "dst: src may not ask"}, 0}, kNow);
    ASSERT_EQ(refused.size(), 1u);
    EXPECT_EQ(refused[0].health, Health::kWarning);  // the operator there wants it so
    EXPECT_NE(refused[0].advice.find("migrd.json of dst"), std::string::npos);
  }
  EXPECT_NE(say(EPROTONOSUPPORT, "dst: ").find("same release"), std::string::npos);
  EXPECT_NE(say(ENOENT, "no host 'dst' among the peers").find("\"peers\""), std::string::npos);
}

TEST(Doctor, ADaemonThatIsSilentOrOfAnotherReleaseIsAFailure) {
  wire::VersionReply own = good().version(), other = own;
  EXPECT_EQ(judge_daemon(own, own, "/x.json").health, Health::kOk);
  other.set_release("0");
  EXPECT_NE(judge_daemon(own, other, "/x.json").advice.find("start migrd again"), std::string::npos);
  other = own;
  other.set_certificate_refused("it expired on 2020-01-01");
  EXPECT_EQ(judge_daemon(own, other, "/x.json").health, Health::kWarning);
  EXPECT_NE(judge_daemon(own, other, "/x.json").found.find("it expired"), std::string::npos);
  auto there = good("dst");
  there.mutable_version()->set_certificate_refused("it expired on 2020-01-01");
  EXPECT_EQ(health_of(judge_peer(good(), answer_of(there), kNow)), Health::kWarning);
  const auto silent = judge_daemon(own, Error{EHOSTUNREACH, "no answer"}, "/x.json");
  EXPECT_EQ(silent.health, Health::kFailed);
  EXPECT_NE(silent.advice.find("systemctl start migrd"), std::string::npos);
  EXPECT_NE(silent.advice.find("migrd --config /x.json"), std::string::npos) << silent.advice;
}

std::vector<Finding> all_that_can_be_wrong() {
  auto f = good(std::string(40, 'h'));
  f.set_module_error(std::string(200, 'm'));
  f.mutable_library()->set_error("a line of words " + std::string(70, 'l') + " and more of them, so that it does not fit by far");
  f.mutable_certificate()->set_ends_s(kNow + kDay);
  f.clear_devices();
  return judge_host(f, kNow);
}

TEST(Doctor, TextFitsIntoEightyColumns) {
  std::istringstream lines(text_of(all_that_can_be_wrong()));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
}

TEST(Doctor, ColoursAreForTerminalsOnly) {
  EXPECT_EQ(text_of(all_that_can_be_wrong()).find('\033'), std::string::npos);
  const auto coloured = doctor_text(all_that_can_be_wrong(), true);
  for (const char* c : {"\033[32mok", "\033[33mwarning", "\033[31mfailed"}) EXPECT_NE(coloured.find(c), std::string::npos) << c;
}

TEST(Doctor, JsonIsAnArrayOfFindings) {
  const auto j = doctor_json({{"src", "runc", Health::kFailed, "no runc", "install it"}, {"src", "criu", Health::kOk, "3.17", ""}});
  EXPECT_EQ(j.dump(), R"([{"check":"src: runc","status":"failed","found":"no runc","advice":"install it"},{"check":"src: criu","status":"ok","found":"3.17","advice":null}])");
}

// ---- facts of files

struct Facts : ::testing::Test {
  void SetUp() override {
    char t[] = "/tmp/migr-facts-XXXXXX";
    ASSERT_NE(mkdtemp(t), nullptr);
    dir = t;
    config.name = "src";
    config.pki = dir + "/ca/src", config.libmigr = dir + "/libmigr.so", config.links_file = dir + "/links.json", config.state_dir = dir;
    config.criu = dir + "/criu", config.criu_libs = dir, config.runc = dir + "/runc";
    ASSERT_TRUE(pki::init(dir + "/ca"));
    ASSERT_TRUE(pki::issue_host(dir + "/ca", "src", {}));
    fs::copy_file("/proc/self/exe", config.libmigr);
    chmod(config.libmigr.c_str(), 0644);
    write("criu", "#!/bin/sh\necho 'Version: 3.17.1'\n");
    write("runc", "#!/bin/sh\necho runc partial-restore --criu-log-level\n");
    write("nft", "#!/bin/sh\necho 'nftables v1.0.6 (Lester Gooch #5)'\n");
    path = getenv("PATH");
    setenv("PATH", dir.c_str(), 1);
    write("migr_plugin.so", "");
    write("links.json", R"({"links": [{"device": "rxe0"}, {"device": "rxe1"}], "policy": "exact"})");
  }
  void TearDown() override {
    setenv("PATH", path.c_str(), 1);
    fs::remove_all(dir);
  }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(dir + "/" + name) << text;
    chmod((dir + "/" + name).c_str(), 0755);
  }
  wire::HostFacts facts(std::uint64_t bytes = 1) { return facts_of(config, {}, bytes); }
  std::string dir, path;
  Config config;
};

TEST_F(Facts, OfFilesThatAreRight) {
  const auto f = facts();
  EXPECT_EQ(f.library().error(), "");
  EXPECT_EQ(f.criu().version(), "3.17.1");
  EXPECT_EQ(f.nft().version(), "v1.0.6");
  EXPECT_EQ(f.plugin().error() + f.runc().error() + f.links().error() + f.certificate().error() + f.room().lacks(), "");
  EXPECT_EQ(f.links().version(), "2 links");
  EXPECT_TRUE(f.certificate().of_ca() && f.certificate().of_key() && f.certificate().of_host());
  EXPECT_GT(f.certificate().ends_s(), std::time(nullptr) + 800 * kDay);
  EXPECT_GT(f.room().free_bytes(), 0u);
  EXPECT_NEAR(static_cast<double>(f.now_ms()) / 1e3, static_cast<double>(std::time(nullptr)), 5);
}

TEST_F(Facts, OfWhatIsNotThere) {
  for (const char* name : {"criu", "nft", "runc", "migr_plugin.so", "libmigr.so", "links.json", "ca/src/host.pem"}) fs::remove(dir + "/" + name);
  const auto f = facts(1ull << 60);
  for (const auto& error : {f.library().error(), f.criu().error(), f.nft().error(), f.plugin().error(), f.runc().error(), f.links().error(), f.certificate().error(), f.room().lacks()})
    EXPECT_NE(error, "");
}

TEST_F(Facts, OfALibraryThatIsNoneOrNotForAll) {
  chmod(config.libmigr.c_str(), 0600);
  EXPECT_NE(facts().library().error().find("owner only"), std::string::npos);
  chmod(config.libmigr.c_str(), 0666);
  EXPECT_NE(facts().library().error().find("can be changed by others"), std::string::npos);
  write("libmigr.so", "text");
  EXPECT_NE(facts().library().error().find("no library"), std::string::npos);
}

TEST_F(Facts, OfLinksThatAreWrong) {
  write("links.json", R"({"links": [], "policy": "sometimes"})");
  EXPECT_NE(facts().links().error(), "");
}

TEST_F(Facts, OfLinksOfDevicesThatAreNotHere) {
  write("links.json", R"({"links": [{"device": "no0"}, {"device": "no1", "port": 2}], "policy": "exact"})");
  const auto f = facts();
  EXPECT_EQ(f.links().error(), "");
  ASSERT_EQ(f.links().missing_size(), 2);
  EXPECT_EQ(f.links().missing(1), "link 1: no RDMA device no1");
}

TEST(Doctor, LinksThatProtectNothingAreSaid) {
  const auto says = [](const std::string& text) {
    links::Config config;
    EXPECT_EQ(links::parse(text, "", config), "");
    std::string all;
    for (const auto& line : without_effect(config)) all += line + "\n";
    return all;
  };
  const std::string two = R"({"links": [{"device": "rxe0"}, {"device": "rxe1"}])", one = R"({"links": [{"device": "rxe0"}, {"device": "rxe0", "port": 2}])";
  const std::string off = "\"policy\" is \"off\" for every device and program that has no MIGR_POLICY\n", few = "fewer than two devices: nothing has a backup\n";
  EXPECT_EQ(says(two + "}"), off);
  EXPECT_EQ(says(two + R"(, "policy": "exact"})"), "");
  EXPECT_EQ(says(two + R"(, "devices": {"rxe1": "resend"}})"), "");
  EXPECT_EQ(says(two + R"(, "devices": {"no": "resend"}})"), off) << "no link is of that device";
  EXPECT_EQ(says(two + R"(, "processes": {"kv": {"policy": "exact"}}})"), "");
  EXPECT_EQ(says(two + R"(, "processes": {"kv": {"paths": "pool"}}})"), off);
  EXPECT_EQ(says(one + R"(, "policy": "exact"})"), few);
  EXPECT_EQ(says(R"({"links": []})"), few + off);
}

TEST(Doctor, LinksAreLookedUpOnTheHost) {
  const auto missing = [](const char* text, const wire::HostFacts& f) {
    links::Config config;
    EXPECT_EQ(links::parse(text, "", config), "");
    std::string all;
    for (const auto& line : missing_of(config, f.devices())) all += line + "\n";
    return all;
  };
  auto f = good();
  f.mutable_devices(0)->mutable_gids(0)->set_index(3);
  EXPECT_EQ(missing(R"({"links": [{"device": "rxe0", "port": 1, "gid_index": 3}]})", f), "");
  EXPECT_EQ(missing(R"({"links": [{"device": "rxe0"}]})", f), "") << "any GID will do";
  EXPECT_EQ(missing(R"({"links": [{"device": "rxe0", "gid_index": 1}, {"device": "rxe0", "port": 2}, {"device": "rxe1"}]})", f),
            "link 0: rxe0/1 has no GID of number 1\nlink 1: rxe0 has no port 2\nlink 2: no RDMA device rxe1\n");
  f.mutable_devices(0)->set_error("no uverbs");
  EXPECT_EQ(missing(R"({"links": [{"device": "rxe0", "port": 2}]})", f), "") << "its ports are not known";
}

TEST_F(Facts, OfRuncWithoutOurVerbs) {
  write("runc", "#!/bin/sh\necho no help topic\n");
  EXPECT_NE(facts().runc().error().find("partial-restore"), std::string::npos);
}

TEST_F(Facts, OfCertificatesOfOthers) {
  config.name = "dst";
  EXPECT_FALSE(facts().certificate().of_host());
  ASSERT_TRUE(pki::init(dir + "/other"));
  ASSERT_TRUE(pki::issue_host(dir + "/other", "src", {}));
  fs::copy_file(dir + "/other/ca.pem", dir + "/ca/src/ca.pem", fs::copy_options::overwrite_existing);
  EXPECT_FALSE(facts().certificate().of_ca());
  fs::copy_file(dir + "/other/src/host.key", dir + "/ca/src/host.key", fs::copy_options::overwrite_existing);
  EXPECT_FALSE(facts().certificate().of_key());
}

TEST_F(Facts, OfCertificatesWithWrongModes) {
  chmod((dir + "/ca/src/ca.pem").c_str(), 0666);
  EXPECT_NE(facts().certificate().error().find("ca.pem can be changed by others"), std::string::npos) << facts().certificate().error();
  chmod((dir + "/ca/src/host.key").c_str(), 0640);
  EXPECT_NE(facts().certificate().error().find("host.key is readable for others"), std::string::npos);
}

}  // namespace
}  // namespace migr::doctor_test
