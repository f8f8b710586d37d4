// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The certificate that this host shows to its peers, and the CAs that it trusts: taken anew while migrd runs, when the files
// in the folder have changed and are right. Connections that stand go on; new ones are made with what was taken last.
#pragma once

#include <grpcpp/security/tls_certificate_provider.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "config.h"
#include "pki.h"
#include "status.h"

namespace migr {

class Certificates {
 public:
  /// @param in_use  folder for what was taken: gRPC watches it, and never sees a file that was not checked, or a key without
  ///                its certificate
  Certificates(const Config& config, std::string in_use) : config_(config), in_use_(std::move(in_use)) {}

  /// Takes what is there. What peers will not accept is only logged: they may be wrong about the time.
  Status start();
  /// Has a look at the files. What has changed is taken when it is the same as at the last look.
  void look();

  /// For servers.
  using Provider = grpc::experimental::CertificateProviderInterface;
  std::shared_ptr<Provider> provider() const { return provider_; }
  struct InUse {
    pki::Files files;
    unsigned number = 0;  ///< another one for others
  };
  InUse in_use() const;
  /// When peers take what is in use no longer: its end, or that of its CA. Seconds since 1970.
  std::int64_t ends_s() const;
  /// Why what is in the folder is not in use; empty: it is.
  std::string refused() const;

 private:
  Status take(const pki::Files& files, const pki::Certificate& certificate);
  std::string look_of_files() const;

  const Config& config_;
  const std::string in_use_;
  std::shared_ptr<Provider> provider_;
  std::string seen_, judged_;  // of start() and look(), one thread
  mutable std::mutex mutex_;
  InUse current_;
  std::int64_t ends_s_ = 0;
  std::string refused_;
};

/// Of files that do not change.
std::shared_ptr<Certificates::Provider> fixed_certificate(const pki::Files& files);

}  // namespace migr
