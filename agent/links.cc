// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "links.h"

#include <chrono>

#include "file_tree.h"
#include "host_service.h"
#include "limits.h"
#include "manifest.h"
#include "runc.h"

namespace migr {
namespace {

using D = wire::Destination::Stub;
using P = wire::Partner::Stub;

wire::Migration migration(std::uint32_t id) {
  wire::Migration m;
  m.set_id(id);
  return m;
}

wire::LimitedRequest limited(std::uint32_t id, int ms) {
  wire::LimitedRequest r;
  r.set_id(id);
  r.set_limit_ms(static_cast<std::uint32_t>(ms));
  return r;
}

class RpcTrial final : public PathTrial {
 public:
  RpcTrial(wire::Host::Stub& host, const std::string& name) : name_(name) {
    set_deadline(ctx_, kCheckMs + kTrialMs);
    name_migration(ctx_);
    stream_ = host.TryPaths(&ctx_);
  }
  // Its ends are gone when this is.
  ~RpcTrial() override { (void)finish(); }
  Result<wire::TrialStep> step(const wire::TrialStep& request) override {
    wire::TrialStep answer;
    if (!finished_ && stream_->Write(request) && stream_->Read(&answer)) return answer;
    const auto s = finish();
    return s ? Error{EPROTO, name_ + ": TryPaths ended in the middle"} : s.error();
  }

 private:
  Status finish() {
    if (std::exchange(finished_, true)) return {};
    stream_->WritesDone();
    return from_grpc(stream_->Finish(), name_);
  }

  const std::string name_;
  grpc::ClientContext ctx_;
  std::unique_ptr<grpc::ClientReaderWriter<wire::TrialStep, wire::TrialStep>> stream_;
  bool finished_ = false;
};

// A host that does not know the migration (any more) has nothing to take back.
Status gone_is_done(Status s) { return !s && s.error().code == ENOENT ? Status() : s; }

// To the other host a message that it cannot read is the end of a stream: so the last one says that it is.
template <class Chunk>
struct WholeStream {
  std::unique_ptr<grpc::ClientWriter<Chunk>> to;
  Chunk chunk{};  // the next message, held back until it is known whether another one comes
  bool open = true;
  Chunk& next() {
    open = open && to->Write(chunk);
    return chunk;
  }
  grpc::Status end(bool whole) {
    chunk.set_last(whole);
    if (whole) next();
    to->WritesDone();
    return to->Finish();
  }
};

}  // namespace

std::unique_ptr<PathTrial> trial_of_peer(wire::Host::Stub& host, const std::string& name) { return std::make_unique<RpcTrial>(host, name); }

Status RpcDestination::check(const wire::CheckRequest& r) {
  // Is anybody there at all? The check itself runs programs, which takes its time.
  if (auto s = call(host_, &wire::Host::Stub::Version, wire::Empty(), kCheckMs, name_); !s) return s.error();
  wire::CheckRequest asked = r;
  const auto address = has_address(bundle_.empty() ? r.bundle() : bundle_);
  asked.set_has_address(address && *address);
  if (!bundle_.empty() || r.bundle().empty()) return call(stub_, &D::Check, asked, kPrepareMs, name_);
  const FolderMark mark(r.bundle());
  asked.set_bundle_mark(mark.name());
  auto reply = call(stub_, &D::Check, asked, kPrepareMs, name_);
  shared_ = reply && reply->bundle_shared();
  if (!reply || shared_) return reply;
  if (const auto bytes = bytes_below(r.bundle()); bytes > kBundleBytes)
    return Error{EFBIG, r.bundle() + " has " + std::to_string(bytes >> 20) + " MB of files, and at most " + std::to_string(kBundleBytes >> 20) +
                            " MB are copied: have the same folder on both hosts (shared storage), or a root filesystem that is mounted there"};
  return {};
}

Result<wire::PrepareReply> RpcDestination::prepare(const wire::PrepareHeader& h, const std::string& folder,
                                                   Sent& total) {
  at_ = h.bundle();
  qps_ = static_cast<std::size_t>(h.vqpns_size());
  root_.clear();
  if (bundle_.empty()) {
    const auto root = writable_root(at_);
    if (!root) return root.error();
    sent_ = SentFiles();
    if (!root->empty())
      if (auto s = sent_.begin(at_); !s) return s.error();
    root_ = *root;
  } else if (auto names = read_root_names(bundle_ + "/..")) {
    const auto root = writable_root(bundle_);
    if (!root) return root.error();
    root_ = *root;
    names_ = std::move(*names);
  } else if (names.error().code != ENOENT) {
    return names.error();
  }
  grpc::ClientContext ctx;
  set_deadline(ctx, kPrepareMs);
  name_migration(ctx);
  wire::PrepareReply reply;
  WholeStream<wire::PrepareChunk> stream{stub_.Prepare(&ctx, &reply)};
  *stream.chunk.mutable_header() = h;
  stream.chunk.set_tells_last(true);
  auto send = [&](const wire::FileChunk& c) {
    auto& chunk = stream.next();
    chunk.clear_header();
    *chunk.mutable_file() = c;
    total.add(c);
    return stream.open;
  };
  Status read;
  if (!shared_ && !at_.empty())  // other folders of it are written to even if its root is read-only
    read = bundle_.empty() ? send_changes(at_, wire::FileChunk::BUNDLE, kBundleBytes, send, sent_) : send_tree(bundle_, wire::FileChunk::BUNDLE, kBundleBytes, send);
  if (read && stream.open) read = send_tree(folder, wire::FileChunk::IMAGES, kBundleBytes, send);
  if (!read) ctx.TryCancel();
  const Status s = from_grpc(stream.end(bool(read)), name_, advice_on(kPrepareMs));
  if (!read) return read.error();
  if (!s) return s.error();
  return reply;
}

Result<wire::PrepareReply> RpcDestination::create(std::uint32_t id) { return call(stub_, &D::Create, migration(id), kPrepareMs, name_); }
Status RpcDestination::connect(const wire::ConnectRequest& r) { return call(stub_, &D::Connect, r, kPrepareMs, name_); }

Status RpcDestination::upload(std::uint32_t id, const std::string& folder, unsigned pre_copy_round, const Written& written,
                              Sent& total) {
  grpc::ClientContext ctx;
  set_deadline(ctx, kUploadMs);
  name_migration(ctx);
  wire::UploadReply reply;
  const auto began = std::chrono::steady_clock::now();
  WholeStream<wire::UploadChunk> stream{stub_.Upload(&ctx, &reply)};
  stream.chunk.set_id(id);
  stream.chunk.set_pre_copy_round(pre_copy_round);
  stream.chunk.set_tells_last(true);
  std::uint64_t sent = 0;
  Status read = send_tree(folder, wire::FileChunk::IMAGES, UINT64_MAX, [&](const wire::FileChunk& c) {
    *stream.next().mutable_file() = c;
    total.add(c);
    sent += c.data().size();
    return stream.open;
  }, written);
  if (!read) ctx.TryCancel();
  const Status s = from_grpc(stream.end(bool(read)), name_);
  if (!read) return read;
  if (!s && s.error().code == ETIMEDOUT) {
    const auto took_s = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - began).count();
    return Error{ETIMEDOUT, name_ + ": " + std::to_string(sent / 1'000'000) + " MB were sent in " + std::to_string(took_s) +
                                " s, and that was not all; if the network has no more, raise upload_ms, and phase_ms above it, in \"limits\" of migrd.json here"};
  }
  if (s && reply.bytes() != sent)
    return Error{EIO, name_ + ": " + std::to_string(reply.bytes()) + " bytes of images arrived, " + std::to_string(sent) + " were sent"};
  return s;
}

Status RpcDestination::upload_changes(std::uint32_t id, Sent& total) {
  if (shared_) return sent_.begin(at_);  // what this host has not written back yet
  const std::string folder = at_ + "/" + root_;
  const bool stored = !bundle_.empty();  // then all of it was sent, and only what has come since it was stored is to go
  if (const auto there = stored ? writable_root(at_) : root_; !there || there->empty()) return there;  // it is mounted from elsewhere
  const auto names = stored ? names_ : names_below(folder);
  if (!names) return names;
  grpc::ClientContext ctx;
  set_deadline(ctx, kUploadMs);
  name_migration(ctx);
  wire::UploadReply reply;
  WholeStream<wire::ChangesChunk> stream{stub_.UploadChanges(&ctx, &reply)};
  stream.chunk.set_id(id);
  stream.chunk.set_tells_last(true);
  std::size_t bytes = 0;
  for (const auto& [name, t] : *names) {
    *stream.chunk.add_names() = t;
    if ((bytes += name.size()) < kChunkBytes / 2) continue;
    stream.next().clear_names();
    bytes = 0;
  }
  stream.chunk.set_all_named(true);
  std::uint64_t sent = 0;
  const Status read = stored ? Status() : send_changes(folder, wire::FileChunk::BUNDLE, kBundleBytes, [&](const wire::FileChunk& c) {
    auto& chunk = stream.next();
    chunk.clear_names();
    *chunk.mutable_file() = c;
    total.add(c);
    sent += c.data().size();
    return stream.open;
  }, sent_, root_ + "/");
  if (!read) ctx.TryCancel();
  const Status s = from_grpc(stream.end(bool(read)), name_, advice_on(kUploadMs));
  if (!read) return read;
  if (s && reply.bytes() != sent)
    return Error{EIO, name_ + ": " + std::to_string(reply.bytes()) + " bytes of what has changed arrived, " + std::to_string(sent) + " were sent"};
  return s;
}

std::unique_ptr<PathTrial> RpcDestination::path_trial() { return trial_of_peer(host_, name_); }
Status RpcDestination::attach_network(std::uint32_t id) { return call(stub_, &D::AttachNetwork, migration(id), kHookMs + 1000, name_); }
Status RpcDestination::full_restore(std::uint32_t id) { return call(stub_, &D::FullRestore, migration(id), kHookMs + kProcessMs, name_); }
Status RpcDestination::ready(std::uint32_t id) { return call(stub_, &D::Ready, migration(id), kReadyMs + kProcessMs, name_); }
Status RpcDestination::commit(std::uint32_t id) { return call(stub_, &D::Commit, migration(id), kCommitMs, name_); }
Result<wire::CommitReply> RpcDestination::rebind(std::uint32_t id) {
  return call(stub_, &D::Rebind, migration(id), kReconnectMs + process_ms(qps_), name_);
}
Result<wire::ResumeReply> RpcDestination::resume(std::uint32_t id) { return call(stub_, &D::Resume, migration(id), process_ms(qps_), name_); }
Status RpcDestination::abort(std::uint32_t id) { return gone_is_done(call(stub_, &D::Abort, migration(id), kAbortMs, name_)); }

Result<wire::Outcome> RpcDestination::outcome(std::uint32_t id) {
  auto r = call(host_, &wire::Host::Stub::GetOutcome, migration(id), kCheckMs, name_);
  if (!r) return r.error();
  return r->outcome();
}

Status RpcDestination::renew(std::uint32_t id) { return call(host_, &wire::Host::Stub::Renew, migration(id), kRenewCallMs, name_); }

Result<wire::FindReply> RpcPartner::find(const wire::FindRequest& r) {
  auto found = call(stub_, &P::Find, r, kCallMs, name_);
  if (!found || !found->qps_size()) return found;
  // It takes part: it has to understand all that is to come.
  const auto v = call(host_, &wire::Host::Stub::Version, wire::Empty(), kCheckMs, name_);
  if (!v) return v.error();
  if (auto s = same_version(("migrd on the partner's host " + name_ + ":").c_str(), v->wire(), kWireVersion); !s) return s.error();
  return found;
}
Result<wire::PartnerPrepareReply> RpcPartner::prepare(const wire::PartnerPrepareRequest& r) {
  qps_ = static_cast<std::size_t>(r.qps_size());
  return call(stub_, &P::Prepare, r, kPrepareMs, name_);
}
Result<wire::PartnerPrepareReply> RpcPartner::create(std::uint32_t id) { return call(stub_, &P::Create, migration(id), kPrepareMs, name_); }
Status RpcPartner::connect(const wire::ConnectRequest& r) { return call(stub_, &P::Connect, r, kPrepareMs, name_); }
std::unique_ptr<PathTrial> RpcPartner::path_trial() { return trial_of_peer(host_, name_); }
Status RpcPartner::suspend(std::uint32_t id) {
  return call(stub_, &P::Suspend, limited(id, kSuspendMs), kSuspendMs + process_ms(qps_) + 1000, name_);
}
Result<wire::TrackReply> RpcPartner::track(std::uint32_t id) {
  auto reply = call(stub_, &P::Track, migration(id), kSuspendMs + 2 * kProcessMs + 1000, name_);
  if (reply || reply.error().code != EPROTONOSUPPORT) return reply;
  wire::TrackReply older;
  older.set_why_not(reply.error().text);
  return older;
}
Result<wire::DrainReply> RpcPartner::drain(std::uint32_t id, int limit_ms) {
  auto r = limited(id, limit_ms);
  r.set_tell(true);
  return call(stub_, &P::Drain, r, limit_ms + kProcessMs + 3000, name_);
}
Result<wire::CutReply> RpcPartner::cut(const wire::CutRequest& r) {
  return call(stub_, &P::Cut, r, process_ms(static_cast<std::size_t>(r.index_size())) + 1000, name_);
}
Result<wire::SettleReply> RpcPartner::settle(const wire::SettleRequest& r) {
  return call(stub_, &P::Settle, r, process_ms(static_cast<std::size_t>(r.qps_size())) + 1000, name_);
}
Status RpcPartner::switch_path(std::uint32_t id) { return call(stub_, &P::Switch, migration(id), process_ms(qps_), name_); }
Result<wire::KeysReply> RpcPartner::keys(const wire::KeysRequest& r) { return call(stub_, &P::Keys, r, kProcessMs + process_ms(qps_), name_); }
Result<wire::ResumeReply> RpcPartner::resume(std::uint32_t id) { return call(stub_, &P::Resume, migration(id), process_ms(qps_), name_); }
Status RpcPartner::old_path(std::uint32_t id) { return gone_is_done(call(stub_, &P::OldPath, migration(id), kProcessMs, name_)); }
Status RpcPartner::rollback(std::uint32_t id) { return gone_is_done(call(stub_, &P::Rollback, migration(id), process_ms(qps_), name_)); }
Status RpcPartner::renew(std::uint32_t id) { return call(host_, &wire::Host::Stub::Renew, migration(id), kRenewCallMs, name_); }

Result<wire::TrafficReply> RpcPartner::traffic(std::uint32_t back_ms) {
  wire::TrafficRequest r;
  r.set_back_ms(back_ms);
  return call(host_, &wire::Host::Stub::Traffic, r, kRenewCallMs, name_);
}

}  // namespace migr
