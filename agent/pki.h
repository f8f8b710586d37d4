// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A small certificate authority, so that nobody is tempted by plain text. A site
// with an own CA uses that one: migrd only reads ca.pem, host.pem and host.key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace migr::pki {

/// Makes `dir` with ca.pem and ca.key (0600). EEXIST: there is a CA already, or what is left of one whose key was taken away.
Status init(const std::string& dir);

inline constexpr long kCaDays = 3650, kHostDays = 825;

/// Issues `dir`/NAME/{host.pem,host.key,ca.pem} for a host; the first goes into
/// the certificate as DNS name, `ips` as addresses. An older one is replaced.
Status issue_host(const std::string& dir, const std::string& name, const std::vector<std::string>& ips, long days = kHostDays);

struct Files {
  std::string ca, cert, key;  // PEM
};

/// Reads what migrd needs. EPERM: the key is readable for others.
Result<Files> load(const std::string& dir);

/// What a host shows to others.
struct Certificate {
  std::string subject;
  std::int64_t begins_s = 0, ends_s = 0, ca_ends_s = 0;  // since 1970; of several CAs the one that signed it
  bool of_ca = false;                                    // signed by the CA, whatever the date is
  bool of_key = false;
  bool of_host = false;  // peers that know the host by `name` trust it
};
/// EINVAL: one of the files holds no PEM.
Result<Certificate> read(const Files& files, const std::string& name);

/// EINVAL: why peers would not take it at that time.
Status check(const Certificate& c, const std::string& name, std::int64_t now_s);

}  // namespace migr::pki
