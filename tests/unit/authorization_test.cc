// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Which peer may do what: every call of wire.proto has a right, a peer that has it not is refused before the service sees
// the call, and a migration is carried on by nobody but who has begun it.
#include "agent/authorization.h"

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "agent/build_id.h"
#include "agent/control_service.h"
#include "agent/destination_host.h"
#include "agent/file_tree.h"
#include "agent/host_service.h"
#include "agent/partner_host.h"
#include "agent/peer_link.h"
#include "temp_folder.h"

namespace migr::authorization_test {
namespace {

namespace fs = std::filesystem;

const google::protobuf::FileDescriptor& wire_file() { return *wire::Empty::descriptor()->file(); }

/// Of each method that peers can call.
std::map<std::string, const google::protobuf::MethodDescriptor*> methods_of_peers() {
  std::map<std::string, const google::protobuf::MethodDescriptor*> out;
  for (int s = 0; s < wire_file().service_count(); s++) {
    const auto* service = wire_file().service(s);
    if (service->name() == "Control") continue;  // on a socket of root's
    for (int m = 0; m < service->method_count(); m++) out["/" + service->full_name() + "/" + service->method(m)->name()] = service->method(m);
  }
  return out;
}

TEST(Authorization, EveryMethodOfPeersHasARightAndNoneIsMadeUp) {
  std::map<std::string, int> listed;
  for (const auto& c : guarded_calls()) listed[c.method]++;
  const auto methods = methods_of_peers();
  EXPECT_GT(methods.size(), 30u);
  for (const auto& [name, m] : methods) EXPECT_EQ(listed[name], 1) << name << " has no entry, or two, in authorization.cc";
  for (const auto& [name, n] : listed) EXPECT_TRUE(methods.contains(name)) << name << " is no method of wire.proto";
}

struct Folder : ::testing::Test {
  Result<Config> load(const std::string& allow) {
    std::ofstream(dir + "/migrd.json") << R"({"name": "a", "peers": [{"name": "b", "address": "b:1"}, {"name": "c", "address": "c:1"}], "allow": )" + allow + "}";
    return load_config(dir + "/migrd.json");
  }
  const TempFolder temp;
  const std::string dir = temp.path;
};

using AllowConfig = Folder;

TEST_F(AllowConfig, RulesArePeersAndContainers) {
  const auto c = load(R"({"to_here": ["b", {"peer": "*", "containers": ["web-*", "db"]}], "read": []})");
  ASSERT_TRUE(c) << c.error().text;
  EXPECT_EQ(c->hosts.now()->allow.size(), 2u);
  const auto hosts = c->hosts.now();
  const auto& to_here = hosts->allow.at(Right::kToHere);
  ASSERT_EQ(to_here.size(), 2u);
  EXPECT_EQ(to_here[0].peer, "b");
  EXPECT_EQ(to_here[1].containers, (std::vector<std::string>{"web-*", "db"}));
  EXPECT_TRUE(c->hosts.now()->allow.at(Right::kRead).empty());
}

TEST_F(AllowConfig, WhatWouldNotDoWhatItSaysIsAnError) {
  for (const char* bad : {R"([])", R"({"to_there": ["b"]})", R"({"read": "b"})", R"({"read": [1]})", R"({"to_here": [{"peer": "b"}]})", R"({"to_here": [{"peer": "b", "containers": []}]})",
                          R"({"to_here": [{"peer": "b", "containers": ["x"], "more": 1}]})", R"({"read": [{"peer": "b", "containers": ["x"]}]})", R"({"read": ["d"]})"}) {
    const auto c = load(bad);
    ASSERT_FALSE(c) << bad;
    EXPECT_NE(c.error().text.find("allow"), std::string::npos) << c.error().text;
  }
}

TEST_F(AllowConfig, AMissingCommaIsFoundByItsLine) {
  const auto c = load("{},\n \"listen\": \"0.0.0.0:1\"\n \"metrics\": \"\"");
  ASSERT_FALSE(c);
  EXPECT_EQ(c.error().code, EINVAL);
  EXPECT_TRUE(c.error().text.starts_with(dir + "/migrd.json: parse error at line 3, column ")) << c.error().text;
  std::ofstream(dir + "/migrd.json") << "[]";
  EXPECT_EQ(load_config(dir + "/migrd.json").error().text, dir + "/migrd.json is not a JSON object");
}

TEST_F(AllowConfig, AStepMayTakeAsLongAsItsLimits) {
  const auto c = load(R"({}, "limits": {"upload_ms": 1800000})");
  ASSERT_FALSE(c);
  EXPECT_EQ(c.error().code, EINVAL);
  EXPECT_EQ(c.error().text, dir + "/migrd.json: limit \"phase_ms\" (" + std::to_string(kPhaseMs) + ") has to be more than \"upload_ms\" (1800000)");
  EXPECT_TRUE(load(R"({}, "limits": {"upload_ms": 1800000, "phase_ms": 2000000})"));
}

// migrctl reload reads the file while others wait by these limits.
TEST_F(AllowConfig, LimitsAreTakenWhenThatIsSaid) {
  const int upload = kUploadMs, phase = kPhaseMs;
  const auto c = load(R"({}, "limits": {"upload_ms": 1800000, "phase_ms": 2000000})");
  ASSERT_TRUE(c);
  EXPECT_EQ(std::pair(kUploadMs, kPhaseMs), std::pair(upload, phase));
  take_limits(*c);
  EXPECT_EQ(std::pair(kUploadMs, kPhaseMs), std::pair(1800000, 2000000));
  take_limits(Config());
  EXPECT_EQ(std::pair(kUploadMs, kPhaseMs), std::pair(upload, phase));
}

TEST_F(AllowConfig, EachLimitThatAStepWaitsForIsLess) {
  for (const char* name : {"commit_ms", "undecided_ms", "check_ms", "abort_ms", "process_ms", "suspend_ms", "reconnect_ms", "compare_ms"}) {
    const auto c = load("{}, \"limits\": {\"" + std::string(name) + "\": " + std::to_string(kPhaseMs) + "}");
    ASSERT_FALSE(c) << name;
    EXPECT_NE(c.error().text.find("has to be more than \"" + std::string(name) + "\""), std::string::npos) << c.error().text;
  }
  EXPECT_TRUE(load(R"({}, "limits": {"go_ms": 7200000})")) << "a restore waits, and no step of the coordinator";
}

// A checkpoint that does not end is ended, and what is left of it.
TEST_F(AllowConfig, ACheckpointMayTakeAsLongAsItsHooks) {
  const auto with = [&](int hook_ms, int checkpoint_ms) {
    const auto c = load("{}, \"limits\": {\"hook_ms\": " + std::to_string(hook_ms) + ", \"checkpoint_ms\": " + std::to_string(checkpoint_ms) + "}");
    return c ? std::string() : c.error().text;
  };
  const int all = kPhaseMs - 3 * kHookMs;
  EXPECT_EQ(with(kHookMs, all - 1), "");
  EXPECT_NE(with(kHookMs, all).find("has to be more than \"checkpoint_ms\" and three times \"hook_ms\" (" + std::to_string(kPhaseMs) + ")"), std::string::npos);
  EXPECT_NE(with(kPhaseMs - 1, kPhaseMs - 1), "");
}

TEST_F(AllowConfig, AddressesHaveAPort) {
  const auto with = [&](const std::string& listen, const std::string& peers) {
    std::ofstream(dir + "/migrd.json") << R"({"name": "a", "listen": ")" << listen << R"(", "peers": [)" << peers << "]}";
    return load_config(dir + "/migrd.json");
  };
  for (const char* good : {"0.0.0.0:7471", "[::]:7471", "host.example:65535"}) {
    const auto c = with(good, R"({"name": "b", "address": ")" + std::string(good) + R"("})");
    ASSERT_TRUE(c) << c.error().text;
    EXPECT_EQ(c->peers()[0].address, good);
  }
  for (const char* bad : {"", "0.0.0.0", "[::]", "::1:7471", ":7471", "host:", "host:x", "host:0", "host:65536", "unix:/run/x"}) {
    const std::string why = " has to be host:port (an IPv6 address in brackets), not \"" + std::string(bad) + "\"";
    auto c = with(bad, "");
    ASSERT_FALSE(c) << bad;
    EXPECT_EQ(c.error().text, dir + "/migrd.json: \"listen\"" + why);
    c = with("0.0.0.0:1", R"({"name": "b", "address": ")" + std::string(bad) + R"("})");
    ASSERT_FALSE(c) << bad;
    EXPECT_EQ(c.error().text, dir + "/migrd.json: \"address\" of 'b' in \"peers\"" + why);
  }
}

TEST_F(AllowConfig, WhatIsThereTwiceOrUnknownIsAnError) {
  const auto with = [&](const std::string& rest) {
    std::ofstream(dir + "/migrd.json") << R"({"name": "a", )" << rest << "}";
    const auto c = load_config(dir + "/migrd.json");
    return c ? "" : c.error().text.substr((dir + "/migrd.json: ").size());
  };
  EXPECT_EQ(with(R"("peers": [{"name": "b", "address": "b:1"}, {"name": "b", "address": "b:2"}])"), "two of \"peers\" are 'b'");
  EXPECT_EQ(with(R"("peers": [{"name": "b", "address": "b:1", "port": 2}])"), "unknown key \"port\" in \"peers\"");
  EXPECT_EQ(with(R"("runc": "x", "criu": "y", "runc": "z")"), "the key \"runc\" is there twice");
  EXPECT_EQ(with(R"("limits": {"call_ms": 1, "call_ms": 2})"), "the key \"call_ms\" is there twice");
}

TEST_F(AllowConfig, ItsFoldersAreAbsolutePaths) {
  for (const std::string key : {"state_dir", "run_dir", "control_socket"})
    for (const std::string bad : {"", "var/lib/migr"}) {
      std::ofstream(dir + "/migrd.json") << R"({"name": "a", ")" << key << R"(": ")" << bad << "\"}";
      const auto c = load_config(dir + "/migrd.json");
      ASSERT_FALSE(c) << key;
      EXPECT_EQ(c.error().text, dir + "/migrd.json: \"" + key + "\" has to be an absolute path, not \"" + bad + "\"");
    }
}

TEST_F(AllowConfig, WhereThingsMayGo) {
  const auto open = load("{}");
  EXPECT_TRUE(may_take(*open, "b", "web-1"));
  const auto c = load(R"({"from_here": [{"peer": "b", "containers": ["web-*"]}]})");
  EXPECT_TRUE(may_take(*c, "b", "web-1"));
  EXPECT_TRUE(may_take(*c, "a", "db"));  // restored here
  for (const auto& [to, what] : {std::pair{"b", "db"}, {"c", "web-1"}}) {
    const auto s = may_take(*c, to, what);
    ASSERT_FALSE(s);
    EXPECT_EQ(s.error().code, EPERM);
    EXPECT_EQ(s.error().text, std::string(to) + " may not take '" + what + "' from here: see \"allow\": {\"from_here\": ..} in migrd.json of a");
  }
}

/// Host a, real but for the kernel, and its peers b and c; d has a certificate, too, and is no peer.
class Peer : public Folder {
 public:
  /// What the CA signed for d loses its name.
  void take_name_away() {
    const auto pem = [](const std::string& path, auto read) {
      const std::unique_ptr<FILE, int (*)(FILE*)> f(fopen(path.c_str(), "r"), fclose);
      return read(f.get(), nullptr, nullptr, nullptr);
    };
    const std::unique_ptr<X509, void (*)(X509*)> cert(pem(dir + "/ca/d/host.pem", PEM_read_X509), X509_free);
    const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(pem(dir + "/ca/ca.key", PEM_read_PrivateKey), EVP_PKEY_free);
    const std::unique_ptr<X509_NAME, void (*)(X509_NAME*)> none(X509_NAME_new(), X509_NAME_free);
    ASSERT_TRUE(cert && key && none);
    X509_EXTENSION_free(X509_delete_ext(cert.get(), X509_get_ext_by_NID(cert.get(), NID_subject_alt_name, -1)));
    ASSERT_TRUE(X509_set_subject_name(cert.get(), none.get()));
    ASSERT_TRUE(X509_sign(cert.get(), key.get(), EVP_sha256()));
    const std::unique_ptr<FILE, int (*)(FILE*)> out(fopen((dir + "/ca/d/host.pem").c_str(), "w"), fclose);
    ASSERT_TRUE(PEM_write_X509(out.get(), cert.get()));
  }

 protected:
  void SetUp() override {
    Folder::SetUp();
    ASSERT_TRUE(pki::init(dir + "/ca"));
    for (const char* h : {"a", "b", "c", "d"}) ASSERT_TRUE(pki::issue_host(dir + "/ca", h, {}));
  }
  void TearDown() override {
    if (server_) server_->Shutdown();
    Folder::TearDown();
  }
  void serve(const std::string& allow) {
    auto c = load(allow);
    ASSERT_TRUE(c) << c.error().text;
    config_ = *c;
    config_.state_dir = dir;
    peers_ = std::make_unique<Peers>(config_, *pki::load(dir + "/ca/a"));
    numbers_ = std::make_unique<Numbers>(config_);
    directory_ = std::make_shared<Directory>(config_);
    destination_ = std::make_unique<DestinationHost>(config_, sessions_, *peers_, claims_, *numbers_);
    whereabouts_ = std::make_unique<Whereabouts>(config_, sessions_, *peers_, *directory_, *numbers_);
    partner_ = std::make_unique<PartnerHost>(config_, sessions_, *peers_, claims_, directory_, *whereabouts_);
    host_ = std::make_unique<HostService>(config_, sessions_, *numbers_, std::vector<Role*>{destination_.get(), partner_.get()});
    grpc::ServerBuilder b;
    b.AddListeningPort("127.0.0.1:0", peers_->server_credentials(), &port_);
    b.RegisterService(host_.get());
    b.RegisterService(destination_.get());
    b.RegisterService(partner_.get());
    server_ = b.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  std::shared_ptr<grpc::Channel> as(const std::string& who) {
    auto& [config, peers] = callers_[who];
    if (!peers) {
      config.name = who;
      config.hosts = Hosts{{{"a", "127.0.0.1:" + std::to_string(port_)}}, {}};
      peers = std::make_unique<Peers>(config, *pki::load(dir + "/ca/" + who));
    }
    return *peers->channel("a");
  }
  /// A message without fields to any method.
  grpc::Status ask(const std::string& who, const std::string& method) {
    grpc::GenericStub stub(as(who));
    grpc::ClientContext ctx;
    set_deadline(ctx, 5000);
    grpc::CompletionQueue q;
    grpc::ByteBuffer reply;
    const grpc::Slice nothing;
    const auto call = stub.PrepareUnaryCall(&ctx, method, grpc::ByteBuffer(&nothing, 1), &q);
    grpc::Status s;
    call->StartCall();
    call->Finish(&reply, &s, &s);
    void* tag;
    bool ok;
    q.Next(&tag, &ok);
    return s;
  }
  template <class Stub, class Req, class Rep>
  Result<Rep> tell(const std::string& who, grpc::Status (Stub::*method)(grpc::ClientContext*, const Req&, Rep*), const Req& r) {
    Stub stub(as(who));
    return call(stub, method, r, 5000, "a");
  }

  Config config_;
  SessionTable sessions_;
  Claims claims_;
  std::unique_ptr<Numbers> numbers_;
  std::shared_ptr<Directory> directory_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<DestinationHost> destination_;
  std::unique_ptr<Whereabouts> whereabouts_;
  std::unique_ptr<PartnerHost> partner_;
  std::unique_ptr<HostService> host_;
  std::unique_ptr<grpc::Server> server_;
  std::map<std::string, std::pair<Config, std::unique_ptr<Peers>>> callers_;
  int port_ = 0;
};

constexpr char kNobody[] = R"({"to_here": [], "partner": [], "read": []})";

TEST_F(Peer, ACertificateWithoutANameIsNobodys) {
  take_name_away();
  serve("{}");
  EXPECT_EQ(ask("b", "/migr.wire.Host/Version").error_code(), grpc::StatusCode::OK);
  const auto s = ask("d", "/migr.wire.Host/Version");
  EXPECT_EQ(s.error_code(), grpc::StatusCode::PERMISSION_DENIED) << s.error_message();
}

TEST_F(Peer, WhoMayWhatIsAsItWasReadLast) {
  serve("{}");
  const char* const version = "/migr.wire.Host/Version";
  EXPECT_EQ(ask("d", version).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  config_.hosts = Hosts{{{"c", "c:1"}, {"d", "d:1"}}, {}};
  EXPECT_EQ(ask("d", version).error_code(), grpc::StatusCode::OK);
  EXPECT_EQ(ask("b", version).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  config_.hosts = Hosts{{{"d", "d:1"}}, {{Right::kRead, {}}}};
  EXPECT_EQ(ask("d", version).error_code(), grpc::StatusCode::OK);
  EXPECT_EQ(ask("d", "/migr.wire.Host/Facts").error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(Peer, WithoutARightEachMethodIsRefusedAndSaysByWhatKey) {
  serve(kNobody);
  for (const auto& c : guarded_calls()) {
    const auto s = ask("b", c.method);
    const bool of_no_migration = std::string_view(c.method).ends_with("/TryPaths");  // then it is for who may ask for facts
    const Right right = of_no_migration ? Right::kRead : c.right;
    if (right == Right::kPeer) {
      EXPECT_NE(s.error_code(), grpc::StatusCode::PERMISSION_DENIED) << c.method;
      continue;
    }
    EXPECT_EQ(s.error_code(), grpc::StatusCode::PERMISSION_DENIED) << c.method << ": " << s.error_message();
    EXPECT_NE(s.error_message().find(std::string("b may not ")), std::string::npos) << s.error_message();
    EXPECT_NE(s.error_message().find(std::string("{\"") + key_of(right) + "\": ..} in migrd.json of a"), std::string::npos) << s.error_message();
  }
}

TEST_F(Peer, WithoutRulesEveryPeerMayAllAndOthersNothing) {
  serve("{}");
  for (const auto& c : guarded_calls()) {
    auto s = ask("b", c.method);
    EXPECT_EQ(s.error_message().find("migrd.json"), std::string::npos) << c.method << ": " << s.error_message();
    s = ask("d", c.method);
    EXPECT_EQ(s.error_code(), grpc::StatusCode::PERMISSION_DENIED) << c.method;
    EXPECT_NE(s.error_message().find("d is none of the \"peers\" in migrd.json of a"), std::string::npos) << s.error_message();
  }
}

TEST_F(Peer, ThisHostMayAllByCertificateAndWithin) {
  serve(kNobody);
  wire::Host::Stub within(server_->InProcessChannel({}));
  EXPECT_TRUE(call(within, &wire::Host::Stub::Facts, wire::FactsRequest(), 5000, "a"));
  EXPECT_TRUE(tell("a", &wire::Host::Stub::Facts, wire::FactsRequest()));
}

TEST_F(Peer, AMethodThatNobodyKnowsIsUNIMPLEMENTED) {
  serve(kNobody);
  EXPECT_EQ(ask("b", "/migr.wire.Host/Nothing").error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(Peer, OneHostMayWhatAnotherMayNot) {
  serve(R"({"partner": ["b"], "to_here": ["c"]})");
  const auto may_partner = [&](const char* who) { return ask(who, "/migr.wire.Partner/Find").error_code() != grpc::StatusCode::PERMISSION_DENIED; };
  const auto may_come = [&](const char* who) { return ask(who, "/migr.wire.Destination/Check").error_code() != grpc::StatusCode::PERMISSION_DENIED; };
  EXPECT_TRUE(may_partner("b") && may_come("c"));
  EXPECT_FALSE(may_partner("c") || may_come("b"));
}

TEST_F(Peer, ContainersAreRefusedByNameBeforeAnythingElseIsLookedAt) {
  serve(R"({"to_here": [{"peer": "b", "containers": ["web-*"]}]})");
  wire::CheckRequest r;
  r.set_container("db");
  auto s = tell("b", &wire::Destination::Stub::Check, r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EPERM);
  EXPECT_EQ(s.error().text, "a: b may not move 'db' to here: see \"allow\": {\"to_here\": ..} in migrd.json of a");
  r.set_container("web-1");
  s = tell("b", &wire::Destination::Stub::Check, r);
  ASSERT_FALSE(s);  // of another version, as the message is empty
  EXPECT_NE(s.error().code, EPERM) << s.error().text;

  // Who does not ask before is not let in either.
  wire::Destination::Stub stub(as("b"));
  grpc::ClientContext ctx;
  wire::PrepareReply reply;
  auto writer = stub.Prepare(&ctx, &reply);
  wire::PrepareChunk first;
  first.mutable_header()->set_id(7), first.mutable_header()->set_container("db"), first.mutable_header()->set_bundle("/b"), first.mutable_header()->set_source("b");
  writer->Write(first);
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

// CRIU would refuse it in the restore, when the container stands still.
TEST_F(Peer, AnotherBuildOfTheLibraryIsRefused) {
  serve("{}");
  config_.libmigr = "/proc/self/exe";
  const std::string why = "a: libmigr is of another build on a (/proc/self/exe) than what programs run on b";
  wire::CheckRequest r;
  r.set_container("web"), r.set_wire(kWireVersion), r.set_proc(MIGR_PROC_VERSION);
  for (const std::string& same : {std::string(), build_id_of(config_.libmigr)}) {
    r.set_libmigr(same);
    const auto s = tell("b", &wire::Destination::Stub::Check, r);
    EXPECT_TRUE(s || s.error().text.find(why) == std::string::npos) << s.error().text;
  }
  r.set_libmigr("another");
  const auto s = tell("b", &wire::Destination::Stub::Check, r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EBUSY);
  EXPECT_EQ(s.error().text.find(why), 0u) << s.error().text;
}

// Found in the source's message before it begins; by an older source only in the bundle that it sends.
TEST_F(Peer, AnAddressThatNothingHereCouldMoveIsRefused) {
  serve("{}");
  const std::string why = "a: an address of a container's own cannot be moved: there is no net_hook; set net_hook in migrd.json of a";
  wire::CheckRequest r;
  r.set_container("web"), r.set_wire(kWireVersion), r.set_proc(MIGR_PROC_VERSION);
  auto s = tell("b", &wire::Destination::Stub::Check, r);
  EXPECT_TRUE(s || s.error().text != why);
  r.set_has_address(true);
  s = tell("b", &wire::Destination::Stub::Check, r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().text, why);

  wire::Destination::Stub stub(as("b"));
  grpc::ClientContext ctx;
  wire::PrepareReply reply;
  auto writer = stub.Prepare(&ctx, &reply);
  wire::PrepareChunk chunk;
  auto* h = chunk.mutable_header();
  h->set_id(7), h->set_container("web"), h->set_bundle(dir + "/bundle"), h->set_source("b");
  writer->Write(chunk);
  fs::create_directory(dir + "/from");
  std::ofstream(dir + "/from/config.json") << R"({"annotations": {"org.migr.net.ip": "10.0.0.1/24"}})";
  EXPECT_TRUE(send_tree(dir + "/from", wire::FileChunk::BUNDLE, 1 << 20, [&](const wire::FileChunk& c) { return *chunk.mutable_file() = c, writer->Write(chunk); }));
  writer->WritesDone();
  EXPECT_EQ("a: " + writer->Finish().error_message(), why);
  EXPECT_FALSE(fs::exists(dir + "/bundle")) << "it is taken back";
}

TEST_F(Peer, NobodyBeginsAMigrationInAnothersName) {
  serve("{}");
  wire::PartnerPrepareRequest r;
  r.set_id(7), r.set_source("c"), r.set_destination("b");
  const auto s = tell("b", &wire::Partner::Stub::Prepare, r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EPERM);
  EXPECT_EQ(s.error().text, "a: migration 00000007 is of c, and not of b");
  wire::Destination::Stub stub(as("b"));
  grpc::ClientContext ctx;
  wire::PrepareReply reply;
  auto writer = stub.Prepare(&ctx, &reply);
  wire::PrepareChunk first;
  first.mutable_header()->set_id(7), first.mutable_header()->set_container("x"), first.mutable_header()->set_bundle("/b"), first.mutable_header()->set_source("c");
  writer->Write(first);
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(Peer, NobodyCarriesOnAnothersMigration) {
  serve("{}");
  wire::PartnerPrepareRequest r;
  r.set_id(7), r.set_source("b"), r.set_destination("c");
  ASSERT_TRUE(tell("b", &wire::Partner::Stub::Prepare, r));
  wire::Migration m;
  m.set_id(7);
  wire::LimitedRequest limited;
  limited.set_id(7);
  using P = wire::Partner::Stub;
  const auto code = [](const auto& s) { return s ? 0 : s.error().code; };
  EXPECT_EQ(code(tell("c", &P::Suspend, limited)), EPERM);
  EXPECT_EQ(code(tell("c", &P::Switch, m)), EPERM);
  EXPECT_EQ(code(tell("c", &P::OldPath, m)), EPERM);
  EXPECT_EQ(code(tell("c", &P::Rollback, m)), EPERM);
  EXPECT_EQ(code(tell("c", &wire::Host::Stub::Renew, m)), EPERM);
  EXPECT_EQ(code(tell("b", &wire::Host::Stub::Renew, m)), 0);
  EXPECT_EQ(code(tell("b", &P::Suspend, limited)), 0);
  EXPECT_EQ(code(tell("b", &P::Rollback, m)), 0);
  m.set_id(8);
  EXPECT_EQ(code(tell("b", &wire::Host::Stub::Renew, m)), ENOENT);
}

// It may have learnt of the process when that introduced itself to a partner.
TEST_F(Peer, NumbersAreReleasedByTheHostThatTheirProcessWentTo) {
  serve(kNobody);
  const Instance who{1};
  std::ofstream(dir + "/born.json") << "{\"" << hex(who) << R"(": {"born": [], "foreign": [], "away": true, "to": "c"}})";
  wire::ReleaseRequest r;
  r.add_instances(who.data(), who.size());
  const auto s = tell("b", &wire::Host::Stub::Release, r);
  ASSERT_FALSE(s);
  EXPECT_EQ(s.error().code, EPERM);
  EXPECT_NE(s.error().text.find("b may not switch connections"), std::string::npos) << s.error().text;
  EXPECT_TRUE(*numbers_->away_at(who));
  wire::ReleaseRequest other;
  other.add_instances(std::string(sizeof(Instance), 'x'));
  EXPECT_TRUE(tell("b", &wire::Host::Stub::Release, other)) << "what is not known is no error";
  EXPECT_TRUE(tell("c", &wire::Host::Stub::Release, r));
  EXPECT_FALSE(*numbers_->away_at(who));
}

// It may have gone on from there, and of that nothing is known here.
TEST_F(Peer, OrByOneThatMaySwitchConnections) {
  serve(R"({"to_here": [], "partner": ["b"], "read": []})");
  const Instance who{1};
  std::ofstream(dir + "/born.json") << "{\"" << hex(who) << R"(": {"born": [], "foreign": [], "away": true, "to": "c"}})";
  wire::ReleaseRequest r;
  r.add_instances(who.data(), who.size());
  EXPECT_TRUE(tell("b", &wire::Host::Stub::Release, r));
  EXPECT_FALSE(*numbers_->away_at(who));
}

/// A call of TryPaths after its first step, of no paths.
struct OpenTrial {
  explicit OpenTrial(const std::shared_ptr<grpc::Channel>& to) : stub(to) {
    set_deadline(ctx, 20'000);
    stream = stub.TryPaths(&ctx);
    wire::TrialStep answer;
    is_open = stream->Write(wire::TrialStep()) && stream->Read(&answer);
  }
  grpc::Status end() {
    stream->WritesDone();
    return stream->Finish();
  }
  wire::Host::Stub stub;
  grpc::ClientContext ctx;
  std::unique_ptr<grpc::ClientReaderWriter<wire::TrialStep, wire::TrialStep>> stream;
  bool is_open = false;
};

TEST_F(Peer, TriesSoManyPathsAtATime) {
  serve("{}");
  std::vector<std::unique_ptr<OpenTrial>> all;
  for (int i = 0; i < kTrialsMax; i++) EXPECT_TRUE(all.emplace_back(std::make_unique<OpenTrial>(as(i % 2 ? "b" : "c")))->is_open) << i;
  OpenTrial more(as("b"));
  EXPECT_FALSE(more.is_open);
  const auto s = more.end();
  EXPECT_EQ(s.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(s.error_message(), "a tries 8 sets of paths already; try again");
  EXPECT_TRUE(all.back()->end().ok());
  EXPECT_TRUE(OpenTrial(as("b")).is_open);
}

TEST_F(Peer, WhoSaysNothingMoreHoldsNoPaths) {
  const int before = std::exchange(kTrialMs, 300), check = std::exchange(kCheckMs, 300);
  serve("{}");
  std::vector<std::unique_ptr<OpenTrial>> all;
  for (int i = 0; i < kTrialsMax; i++) EXPECT_TRUE(all.emplace_back(std::make_unique<OpenTrial>(as("b")))->is_open);
  wire::TrialStep answer;
  for (const auto& t : all) {
    EXPECT_FALSE(t->stream->Read(&answer)) << "it waits as we do";
    EXPECT_EQ(t->stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  bool is_open = false;
  for (int ms = 0; ms < 5'000 && !is_open; ms += 50) usleep(50'000), is_open = OpenTrial(as("b")).is_open;
  EXPECT_TRUE(is_open);
  kTrialMs = before, kCheckMs = check;
}

TEST_F(Peer, KeysAreForThoseWhoTakePart) {
  const Journal<journal::Destination> journal(dir + "/journal/destination");
  const auto keep = [&](std::uint32_t id, const std::vector<std::string>& hosts) {
    journal::Destination r;
    auto* h = r.mutable_header();
    h->set_id(id), h->set_source("c"), h->set_container("web"), h->set_bundle("/b");
    for (const auto& name : hosts) h->add_hosts(name);
    r.add_keys()->add_vrkey(1);
    r.set_outcome(wire::COMMITTED);
    r.set_resumed(true);
    r.set_begun_s(unix_now());
    ASSERT_TRUE(journal.save(id, r));
  };
  keep(7, {"c"});
  keep(8, {"c", "b"});
  keep(9, {});  // begun by an older migrd
  serve("{}");
  const auto keys = [&](const char* who, std::uint32_t id) {
    wire::Migration m;
    m.set_id(id);
    const auto o = tell(who, &wire::Host::Stub::GetOutcome, m);
    EXPECT_TRUE(o && o->outcome() == wire::COMMITTED);
    EXPECT_EQ(o->keys_known(), o->keys_size() == 1);
    return o->keys_size();
  };
  EXPECT_EQ(keys("b", 7), 0);
  EXPECT_EQ(keys("c", 7), 1);
  EXPECT_EQ(keys("a", 7), 1) << "it has partners on this host";
  EXPECT_EQ(keys("b", 8), 1);
  EXPECT_EQ(keys("b", 9), 1);
}

// ---- what is logged of it

/// Takes what is logged, with its fields, instead of standard error.
class Logged : public spdlog::sinks::base_sink<std::mutex> {
 public:
  struct Line {
    LogFields fields;
    std::string text;
  };
  static std::shared_ptr<Logged> begin() {
    auto sink = std::make_shared<Logged>();
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink));
    return sink;
  }
  std::vector<Line> lines() {
    std::lock_guard lock(mutex_);
    return lines_;
  }
  /// Of the first one with these words.
  LogFields of(const std::string& words) {
    for (const auto& l : lines())
      if (l.text.find(words) != std::string::npos) return l.fields;
    ADD_FAILURE() << "nothing is logged of: " << words;
    return {};
  }

 private:
  void sink_it_(const spdlog::details::log_msg& m) override { lines_.push_back({log_fields(), {m.payload.data(), m.payload.size()}}); }
  void flush_() override {}
  std::vector<Line> lines_;
};

TEST_F(Peer, ARefusedReleaseIsLoggedOnceOfEachProcess) {
  serve(kNobody);
  const auto logged = Logged::begin();
  const Instance one{1}, two{2};
  std::ofstream(dir + "/born.json") << "{\"" << hex(one) << R"(": {"born": [], "foreign": [], "away": true, "to": "c"}, ")" << hex(two) << R"(": {"born": [], "foreign": [], "away": true, "to": "c"}})";
  for (const auto* who : {&one, &two, &one, &two}) {
    wire::ReleaseRequest r;
    r.add_instances(who->data(), who->size());
    EXPECT_EQ(tell("b", &wire::Host::Stub::Release, r).error().code, EPERM);
  }
  const auto lines = logged->lines();
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(), [](const auto& l) { return l.text.find("has not gone to it") != std::string::npos; }), 2);
}

TEST_F(Peer, WhatIsLoggedOfACallHasTheMigrationThatItIsForAndWhoCalled) {
  serve(R"({"to_here": [{"peer": "b", "containers": ["web-*"]}], "partner": ["b"], "read": []})");
  const auto logged = Logged::begin();
  const auto expect = [&](const std::string& words, std::uint32_t migration, const char* peer, const char* phase) {
    const auto f = logged->of(words);
    EXPECT_EQ(f.migration, migration) << words;
    EXPECT_EQ(f.peer, peer) << words;
    EXPECT_EQ(f.phase, phase) << words;
  };
  wire::CheckRequest check;
  check.set_container("db");
  wire::FindRequest find;
  {
    const LogScope of_the_caller(0x17);  // as its coordinator has it
    EXPECT_FALSE(tell("b", &wire::Destination::Stub::Check, check));
    EXPECT_FALSE(tell("c", &wire::Partner::Stub::Find, find));
    wire::PartnerPrepareRequest r;
    r.set_id(0x17), r.set_source("c"), r.set_destination("b");
    EXPECT_FALSE(tell("b", &wire::Partner::Stub::Prepare, r));
    r.set_source("b");
    EXPECT_TRUE(tell("b", &wire::Partner::Stub::Prepare, r));
    wire::LimitedRequest limited;
    limited.set_id(0x17);
    EXPECT_TRUE(tell("b", &wire::Partner::Stub::Suspend, limited));
  }
  expect("'db' is refused: b may not move", 0x17, "b", "destination.check");
  expect("/migr.wire.Partner/Find: c may not switch", 0x17, "c", "");
  expect("migration 00000017 is of c", 0x17, "b", "partner.prepare");
  expect("0 processes here", 0x17, "b", "partner.prepare");
  expect("done", 0x17, "b", "partner.suspend");
  EXPECT_TRUE(logged->of("done").ms);
  // The number is in the message, too: an older migrd says it only there.
  wire::Migration m;
  m.set_id(0x17);
  EXPECT_TRUE(tell("b", &wire::Partner::Stub::Rollback, m));
  EXPECT_EQ(logged->lines().back().fields.migration, 0x17u);
  EXPECT_EQ(logged->lines().back().fields.phase, "partner.rollback");
  for (const auto& l : logged->lines()) EXPECT_EQ(l.fields.migration, 0x17u) << l.text;
}

TEST_F(Peer, EachMigrationsRefusalIsLoggedButNotEachOfAStrangersNumbers) {
  serve(kNobody);
  const auto logged = Logged::begin();
  for (const std::uint32_t id : {1u, 2u, 2u, 3u}) {
    const LogScope log(id);
    for (const char* who : {"b", "d"}) EXPECT_FALSE(tell(who, &wire::Destination::Stub::Check, wire::CheckRequest()));
  }
  std::map<std::string, std::vector<std::uint32_t>> said;
  for (const auto& l : logged->lines()) said[l.fields.peer].push_back(l.fields.migration);
  EXPECT_EQ(said["b"], (std::vector<std::uint32_t>{1, 2, 3}));
  EXPECT_EQ(said["d"], (std::vector<std::uint32_t>{1}));
}

TEST(NamedMigration, IsEightHexDigitsOrNone) {
  const auto named = [](const char* text) { return named_migration({{"migr-migration", text}}); };
  EXPECT_EQ(named("0a1b2c3d"), 0x0a1b2c3du);
  for (const char* bad : {"", "0", "a1b2c3d", "0A1B2C3D", "00000000", "0a1b2c3d ", "0x1b2c3d", "0a1b2c3d4", "-0000001", "\n0000001"}) EXPECT_EQ(named(bad), 0u) << bad;
  EXPECT_EQ(named_migration({}), 0u);
}

// ---- ctl.sock

using ControlSocket = Folder;

constexpr int kHungUp = 254, kAnswered = 253;
/// What another user gets there who says this: an errno of connect(), or what became of the connection.
int as_nobody(const std::string& path, const std::string& says) {
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t kNobodyUid = 65534;
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::strcpy(a.sun_path, path.c_str());
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (setgid(kNobodyUid) || setuid(kNobodyUid)) _exit(255);
    if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a)) _exit(errno);
    alarm(10);
    char answer[1];
    if (send(fd, says.data(), says.size(), MSG_NOSIGNAL) < 0 && errno != EPIPE) _exit(255);
    _exit(read(fd, answer, 1) > 0 ? kAnswered : kHungUp);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST_F(ControlSocket, IsForItsOwnerAlone) {
  wire::Control::Service nothing;
  const std::string path = dir + "/ctl.sock";
  const mode_t loose = umask(0);
  const auto server = serve_root(path, nothing);
  umask(loose);
  ASSERT_TRUE(server) << server.error().text;
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 07777, 0600u);
  if (geteuid()) GTEST_SKIP() << "not root: cannot try as another user";
  chmod(dir.c_str(), 0755);
  EXPECT_EQ(as_nobody(path, ""), EACCES);
}

/// One call, as migrctl does it.
grpc::Status asked(const std::string& path) {
  wire::Control::Stub stub(grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials()));
  grpc::ClientContext ctx;
  set_deadline(ctx, 5000);
  wire::VersionReply reply;
  return stub.Version(&ctx, {}, &reply);
}

TEST_F(ControlSocket, AnswersOneAfterTheOtherAndGoesWithItsServer) {
  wire::Control::Service nothing;
  const std::string path = dir + "/ctl.sock";
  {
    const auto server = serve_root(path, nothing);
    ASSERT_TRUE(server) << server.error().text;
    for (int i = 0; i < 3; i++) EXPECT_EQ(asked(path).error_code(), grpc::StatusCode::UNIMPLEMENTED) << "of a service that is none";
  }
  EXPECT_EQ(asked(path).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(serve_root(path, nothing)) << "again at the same place";
}

// Whatever has happened to the mode of the socket and its folder.
TEST_F(ControlSocket, LetsNobodyButRootSpeakEvenIfAllCanConnect) {
  if (geteuid()) GTEST_SKIP() << "not root: cannot try as another user";
  wire::Control::Service nothing;
  const std::string path = dir + "/ctl.sock";
  const auto server = serve_root(path, nothing);
  ASSERT_TRUE(server) << server.error().text;
  ASSERT_EQ(chmod(dir.c_str(), 0755), 0);
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  const auto logged = Logged::begin();
  // What begins each connection of HTTP/2. It hangs up without a word.
  EXPECT_EQ(as_nobody(path, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), kHungUp);
  EXPECT_NE(logged->lines().at(0).text.find("of user 65534"), std::string::npos) << logged->lines()[0].text;
  EXPECT_EQ(asked(path).error_code(), grpc::StatusCode::UNIMPLEMENTED) << "root is answered as before";
  EXPECT_EQ(logged->lines().size(), 1u);
}

}  // namespace
}  // namespace migr::authorization_test
