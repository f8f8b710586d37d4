// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A small certificate authority, so that nobody is tempted by plain text. A site
// with an own CA uses that one: migrd only reads ca.pem, host.pem and host.key.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace migr::pki {

/// Makes `dir` with ca.pem and ca.key (0600). EEXIST: there is a CA already.
Status init(const std::string& dir);

/// Issues `dir`/NAME/{host.pem,host.key,ca.pem} for a host; the first goes into
/// the certificate as DNS name, `ips` as addresses. An older one is replaced.
Status issue_host(const std::string& dir, const std::string& name, const std::vector<std::string>& ips);

struct Files {
  std::string ca, cert, key;  // PEM
};

/// Reads what migrd needs. EPERM: the key is readable for others.
Result<Files> load(const std::string& dir);

}  // namespace migr::pki
