// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What another host may call and what a process may ask: any sequence of calls of authorization.cc's list, with any bytes as
// requests, through gRPC into the services as migrd has them; any packets at proc.sock. The kernel is that of tests/faults;
// there is one process with libmigr, which answers.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "agent/authorization.h"
#include "agent/claims.h"
#include "agent/destination_host.h"
#include "agent/directory.h"
#include "agent/failover/peer_directory.h"
#include "agent/file_tree.h"
#include "agent/host_service.h"
#include "agent/numbers.h"
#include "agent/partner_host.h"
#include "agent/whereabouts.h"
#include "uapi/migr.h"
#include "seeds.h"
#include "tests/faults/model.h"

namespace {

namespace fs = std::filesystem;
namespace pb = google::protobuf;
using namespace migr;

constexpr char kHost[] = "fuzz";
constexpr std::uint32_t kNumber = 17;  // of a migration and a QP, in seeds and in the modelled kernel
constexpr int kGid = 1, kCallLimitMs = 5000;

// ---- the host

/// A folder that the modelled kernel and migrd have for themselves, emptied for each input.
const fs::path& place() {
  static const struct Folder {
    Folder() : path(own_folder()) { setenv("MODEL_HOST", path.c_str(), 1); }
    ~Folder() { (void)remove_folder(path); }
    const fs::path path;
  } folder;
  return folder.path;
}
std::string socket_path() { return place() / "run" / "proc.sock"; }

int connected() {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  std::strcpy(a.sun_path, socket_path().c_str());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (!connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a)) return fd;
  close(fd);
  return -1;
}

/// A process with libmigr, of the user whom migrd is here, who may look at its threads: whatever it is told, it has done.
[[noreturn]] void live() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  static char in[1 << 17];
  for (;; usleep(500)) {
    const Fd fd(connected());
    if (fd.n < 0) continue;
    migr_msg m{};
    m.version = MIGR_PROC_VERSION;
    m.type = MIGR_MSG_HELLO;
    m.control_tid = getpid();
    if (send(fd.n, &m, sizeof m, MSG_NOSIGNAL) < 0) continue;
    while (recv(fd.n, in, sizeof in, 0) >= static_cast<ssize_t>(sizeof m)) {
      struct {
        migr_msg head;
        migr_qp_spare spare;
      } answer{};
      std::memcpy(&m, in, sizeof m);
      answer.head = m;
      answer.head.type |= MIGR_REPLY;
      answer.head.flags = answer.head.count = answer.head.record_size = 0;
      std::size_t bytes = sizeof answer.head;
      if (m.type == MIGR_MSG_QP_CREATE) {
        answer.spare = {kNumber, kNumber, kNumber + 1, 1};
        answer.head.record_size = sizeof answer.spare;
        answer.head.count = 1;
        bytes = sizeof answer;
      }
      if (send(fd.n, &answer, bytes, MSG_NOSIGNAL) < 0) break;
    }
  }
}
pid_t process() {
  static const pid_t pid = [] {
    (void)place();
    const pid_t child = fork();
    if (!child) live();
    always(child > 0, "there is room for a process");
    return child;
  }();
  return pid;
}

void furnish() {
  for (const auto& e : fs::directory_iterator(place())) fs::remove_all(e.path());
  for (const char* d : {"kernel", "reserved", "run", "state"}) fs::create_directory(place() / d);
  model::State s;
  s.pid = process();
  s.instance = std::string(32, '0');
  s.ctx = s.vqpn = s.pqpn = s.dest_pqpn = kNumber;
  s.gid = s.dest_gid = kGid;
  s.write(place() / "kernel" / std::to_string(s.pid));
}

Config config() {
  furnish();
  Config c;
  c.name = kHost;
  c.state_dir = place() / "state";
  c.run_dir = place() / "run";
  c.runc = c.criu = c.net_hook = "/bin/false";
  c.runc_root = place() / "runc";
  return c;
}

struct Host {
  Host() {
    always(bool(sessions.start(
               socket_path(), [](const auto&) {}, [this](const Question& q) { return whereabouts.answer(q); })),
           "processes can connect");
    grpc::ServerBuilder b;
    b.RegisterService(&host);
    b.RegisterService(&destination);
    b.RegisterService(&partner);
    b.RegisterService(&links_service);
    server = b.BuildAndStart();
    channel = server->InProcessChannel({});
    peers.set_self(channel);
    for (int i = 0; sessions.all().empty() && i < 1000; i++) usleep(1000);
  }
  ~Host() {
    destination.shutdown();
    server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(kCallLimitMs));
    sessions.stop();
  }

  const Config config = ::config();
  Peers peers{config, pki::Files{}};
  SessionTable sessions;
  Claims claims;
  Numbers numbers{config};
  const std::shared_ptr<Directory> directory = std::make_shared<Directory>(config);
  DestinationHost destination{config, sessions, peers, claims, numbers};
  Whereabouts whereabouts{config, sessions, peers, *directory, numbers};
  PartnerHost partner{config, sessions, peers, claims, directory, whereabouts};
  LinkTable table{kHost};
  LinksService links_service{table};
  HostService host{config, sessions, numbers, {&destination, &partner}};
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<grpc::Channel> channel;
};

const pb::MethodDescriptor* descriptor_of(const char* method) {
  std::string name = method + 1;  // "/migr.wire.Host/Version"
  std::replace(name.begin(), name.end(), '/', '.');
  const pb::MethodDescriptor* d = pb::DescriptorPool::generated_pool()->FindMethodByName(name);
  always(d, "wire.proto has the call");
  return d;
}
std::unique_ptr<pb::Message> empty(const pb::Descriptor* type) {
  return std::unique_ptr<pb::Message>(pb::MessageFactory::generated_factory()->GetPrototype(type)->New());
}

/// What depends on this run: the process by its number, and where bundles lie: a peer may have them anywhere, but not here.
void localize(pb::Message& m) {
  const pb::Reflection* r = m.GetReflection();
  std::vector<const pb::FieldDescriptor*> set;
  r->ListFields(m, &set);
  for (const auto* f : set) {
    if (f->name() == "bundle" && !f->is_repeated()) r->SetString(&m, f, place() / "bundle");
    if (f->name() == "pid" && !f->is_repeated() && r->GetInt32(m, f) == kNumber) r->SetInt32(&m, f, process());
    if (f->cpp_type() != pb::FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!f->is_repeated()) localize(*r->MutableMessage(&m, f));
    else
      for (int i = 0; i < r->FieldSize(m, f); i++) localize(*r->MutableRepeatedMessage(&m, f, i));
  }
}
std::string localized(const char* method, std::string_view request) {
  const auto m = empty(descriptor_of(method)->input_type());
  if (!m->ParseFromArray(request.data(), static_cast<int>(request.size()))) return std::string(request);
  localize(*m);
  return m->SerializeAsString();
}

/// @param requests  more than one only if the call takes a stream: else a client has broken gRPC, and waits
void call_it(const std::shared_ptr<grpc::Channel>& channel, const char* method, const std::vector<std::string_view>& requests) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext ctx;
  ctx.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(kCallLimitMs));
  grpc::CompletionQueue cq;
  const auto ended = [&cq] {
    void* tag = nullptr;
    bool ok = false;
    return !cq.Next(&tag, &ok) || !ok;
  };
  const auto call = stub.PrepareCall(&ctx, method, &cq);
  call->StartCall(nullptr);
  bool over = ended();
  for (std::size_t i = 0; i < requests.size() && !over; i++) {
    const grpc::Slice slice(localized(method, requests[i]));
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    over = ended();
  }
  if (!over) {
    call->WritesDone(nullptr);
    (void)ended();
    do {
      grpc::ByteBuffer reply;
      call->Read(&reply, nullptr);
    } while (!ended());
  }
  grpc::Status s;
  call->Finish(&s, nullptr);
  (void)ended();
  spdlog::info("{}: {} {}", method, static_cast<int>(s.error_code()), s.error_message());
  always(s.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED, "every call has an end");
  // gRPC itself says INTERNAL, and no more, of a request that is not one.
  always(s.ok() || s.error_code() == grpc::StatusCode::INTERNAL || !s.error_message().empty(), "a refusal has its reason");
  cq.Shutdown();
  while (!ended()) continue;
}

/// What a process sends on a connection of its own, and no more.
void say(const std::vector<std::string_view>& packets) {
  const Fd fd(connected());
  always(fd.n >= 0, "migrd takes a connection");
  const timeval limit{kCallLimitMs / 1000, 0};
  setsockopt(fd.n, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  for (const auto& p : packets)
    if (send(fd.n, p.data(), p.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
  shutdown(fd.n, SHUT_WR);
  char answer[1 << 10];
  ssize_t n = 0;
  while ((n = recv(fd.n, answer, sizeof answer, 0)) > 0) continue;
  always(!n || errno == ECONNRESET, "every question has an end");
}

// ---- seeds

// What has to be right, lest everything ends there.
const std::map<std::string, std::uint32_t> kRight = {{"wire", kWireVersion}, {"proc", MIGR_PROC_VERSION}, {"abi", MIGR_ABI_VERSION}, {"index", 0}, {"ctx_owner", 0}};

std::unique_ptr<pb::Message> plausible(const pb::Descriptor* type) {
  auto m = empty(type);
  const pb::Reflection* r = m->GetReflection();
  for (int i = 0; i < type->field_count(); i++) {
    const pb::FieldDescriptor* f = type->field(i);
    const bool many = f->is_repeated();
    if (f->containing_oneof() && f->containing_oneof()->field(0) != f) continue;
    switch (f->cpp_type()) {
      case pb::FieldDescriptor::CPPTYPE_UINT32: {
        const auto n = kRight.contains(f->name()) ? kRight.at(f->name()) : kNumber;
        many ? r->AddUInt32(m.get(), f, n) : r->SetUInt32(m.get(), f, n);
        break;
      }
      case pb::FieldDescriptor::CPPTYPE_INT32: many ? r->AddInt32(m.get(), f, kNumber) : r->SetInt32(m.get(), f, kNumber); break;
      case pb::FieldDescriptor::CPPTYPE_UINT64: many ? r->AddUInt64(m.get(), f, kNumber) : r->SetUInt64(m.get(), f, kNumber); break;
      case pb::FieldDescriptor::CPPTYPE_STRING: {
        std::string text = kHost;
        if (f->type() == pb::FieldDescriptor::TYPE_BYTES) {  // an instance, or a GID of the modelled kernel
          text.assign(sizeof(Instance), '\0');
          if (f->name().find("gid") != std::string::npos) text.back() = kGid;
        }
        many ? r->AddString(m.get(), f, text) : r->SetString(m.get(), f, text);
        break;
      }
      case pb::FieldDescriptor::CPPTYPE_MESSAGE:
        if (many && f->message_type()->options().map_entry()) break;
        (many ? r->AddMessage(m.get(), f) : r->MutableMessage(m.get(), f))->CopyFrom(*plausible(f->message_type()));
        break;
      default: break;
    }
  }
  return m;
}
/// The same for one that takes a stream: what it is about, then the files of a folder, the configuration of a container; or its three steps.
std::vector<std::string> plausible_stream(const pb::Descriptor* type) {
  const auto m = plausible(type);
  const pb::FieldDescriptor* file = type->FindFieldByName("file");
  if (!file) return {3, m->SerializeAsString()};
  m->GetReflection()->ClearField(m.get(), file);
  std::vector<std::string> out{m->SerializeAsString()};
  const fs::path folder = place() / "seed";
  fs::create_directory(folder);
  std::ofstream(folder / "config.json") << R"({"process": {"env": []}, "root": {"path": "rootfs"}})";
  (void)send_tree(folder, wire::FileChunk::BUNDLE, 1 << 20, [&](const wire::FileChunk& c) {
    m->Clear();
    m->GetReflection()->MutableMessage(m.get(), file)->CopyFrom(c);
    out.push_back(m->SerializeAsString());
    return true;
  });
  return out;
}

}  // namespace

constexpr char kSay = '\xff';
std::string question(std::uint16_t type, std::uint32_t record_size, const std::string& records) {
  migr_msg m{};
  m.version = MIGR_PROC_VERSION;
  m.type = type;
  m.arg = MIGR_QP_NAME(kNumber, kNumber);
  m.record_size = record_size;
  m.count = 1;
  return part(kSay + bytes_of(m) + records);
}

/// The first byte of a part is the index of the call in guarded_calls(), or kSay: what a process says; for that and calls that take a stream, parts one after
/// the other are one.
std::vector<std::string> seeds() {
  std::vector<std::string> out;
  std::string partner, destination, all;
  for (std::size_t i = 0; i < guarded_calls().size(); i++) {
    const std::string method = guarded_calls()[i].method;
    const auto* d = descriptor_of(method.c_str());
    std::string p;
    for (const auto& request : d->client_streaming() ? plausible_stream(d->input_type()) : std::vector{plausible(d->input_type())->SerializeAsString()})
      p += part(static_cast<char>(i) + request);
    out.push_back(p);
    all += p;
    if (method.find(".Partner/") != std::string::npos) partner += p;
    if (method.find(".Destination/") != std::string::npos) destination += p;
  }
  migr_qp_address named{};
  named.gid[15] = kGid;
  named.qpn = kNumber;
  out.insert(out.end(), {partner, destination, all, question(MIGR_MSG_WHERE, sizeof named, bytes_of(named)),
                         question(MIGR_MSG_INTRODUCE, sizeof(migr_key_map), bytes_of(migr_key_map{kNumber, kNumber, {}}))});
  return out;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (!getenv("MIGR_FUZZ_LOG")) spdlog::set_level(spdlog::level::off);  // to look at an input that was found
  const Host host;
  const auto calls = guarded_calls();
  const auto all = parts(data, size);
  for (std::size_t i = 0; i < all.size(); i++) {
    if (all[i].empty()) continue;
    const char which = all[i][0];
    const char* const method = which == kSay ? nullptr : calls[static_cast<std::uint8_t>(which) % calls.size()].method;
    std::vector<std::string_view> requests{all[i].substr(1)};
    if (!method || descriptor_of(method)->client_streaming())
      while (i + 1 < all.size() && !all[i + 1].empty() && all[i + 1][0] == which) requests.push_back(all[++i].substr(1));
    if (!method) say(requests);
    else call_it(host.channel, method, requests);
  }
  return 0;
}
