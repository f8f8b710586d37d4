// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "certificates.h"

#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>

#include "clock.h"
#include "file_tree.h"
#include "text.h"

namespace migr {
namespace {

constexpr unsigned kGrpcLooksS = 1;
// One file, so that gRPC cannot read a key of before with a certificate of after.
constexpr char kIdentity[] = "/identity.pem", kTrusted[] = "/trusted.pem";

// It is worth nothing without the CA that signed it.
std::int64_t end_of(const pki::Certificate& c) { return std::min(c.ends_s, c.ca_ends_s); }

}  // namespace

Status Certificates::start() {
  if (mkdir(in_use_.c_str(), 0700) && errno != EEXIST) return sys_error("cannot make " + in_use_);
  seen_ = judged_ = look_of_files();
  const auto files = pki::load(config_.pki);
  if (!files) return files.error();
  const auto certificate = pki::read(*files, config_.name);
  if (!certificate) return Error{certificate.error().code, config_.pki + ": " + certificate.error().text};
  if (!certificate->of_key) return pki::check(*certificate, config_.name, 0);
  if (auto s = pki::check(*certificate, config_.name, unix_now()); !s) spdlog::error("peers will not accept the certificate in {}: {}", config_.pki, s.error().text);
  if (auto s = take(*files, *certificate); !s) return s;
  provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(in_use_ + kIdentity, in_use_ + kIdentity, in_use_ + kTrusted, kGrpcLooksS);
  return {};
}

// Trust first: who has a certificate of a new CA has to know that CA.
Status Certificates::take(const pki::Files& files, const pki::Certificate& certificate) {
  if (auto s = write_whole(in_use_ + kTrusted, files.ca); !s) return s;
  if (auto s = write_whole(in_use_ + kIdentity, files.key + "\n" + files.cert); !s) return s;
  std::lock_guard lock(mutex_);
  current_ = {files, current_.number + 1};
  ends_s_ = end_of(certificate);
  refused_.clear();
  return {};
}

std::string Certificates::look_of_files() const {
  std::string out;
  for (const char* name : {"/ca.pem", "/host.pem", "/host.key"}) {
    struct stat st {};
    if (!stat((config_.pki + name).c_str(), &st))
      out += fmt::format("{} {} {} {}.{} {}.{};", st.st_ino, st.st_size, st.st_mode, st.st_mtim.tv_sec, st.st_mtim.tv_nsec, st.st_ctim.tv_sec, st.st_ctim.tv_nsec);
  }
  return out;
}

void Certificates::look() {
  const auto now = look_of_files();
  const bool still = now == seen_;  // else they are being copied
  seen_ = now;
  const auto before = refused();
  if (!still || (now == judged_ && before.empty())) return;  // what is not valid yet will be
  judged_ = now;
  const auto files = pki::load(config_.pki);
  const auto certificate = files ? pki::read(*files, config_.name) : Result<pki::Certificate>(files.error());
  Status s = certificate;
  if (s) s = pki::check(*certificate, config_.name, unix_now());
  if (s) s = take(*files, *certificate);
  if (s) return spdlog::info("new certificate of {}, valid until {}: new connections use it", certificate->subject, local_time(end_of(*certificate)));
  if (s.error().text != before) spdlog::error("what is new in {} is not taken, the certificate of before stays: {}", config_.pki, s.error().text);
  std::lock_guard lock(mutex_);
  refused_ = s.error().text;
}

Certificates::InUse Certificates::in_use() const {
  std::lock_guard lock(mutex_);
  return current_;
}

std::int64_t Certificates::ends_s() const {
  std::lock_guard lock(mutex_);
  return ends_s_;
}

std::string Certificates::refused() const {
  std::lock_guard lock(mutex_);
  return refused_;
}

std::shared_ptr<Certificates::Provider> fixed_certificate(const pki::Files& files) {
  return std::make_shared<grpc::experimental::StaticDataCertificateProvider>(files.ca, std::vector<grpc::experimental::IdentityKeyCertPair>{{files.key, files.cert}});
}

}  // namespace migr
