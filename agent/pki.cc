// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "pki.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>

#include "text.h"

namespace migr::pki {
namespace {

// OpenSSL frees what all threads share when a process exits, while threads of gRPC still connect to a peer that is gone: they
// crash in it, which gRPC before 1.83 does nothing about. The first call in a process decides, so it is made before main().
[[maybe_unused]] const int kNothingFreedAtExit = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

struct Free {
  void operator()(EVP_PKEY* p) const { EVP_PKEY_free(p); }
  void operator()(X509* p) const { X509_free(p); }
  void operator()(BIO* p) const { BIO_free(p); }
  void operator()(X509_STORE* p) const { X509_STORE_free(p); }
  void operator()(X509_STORE_CTX* p) const { X509_STORE_CTX_free(p); }
  void operator()(X509_EXTENSION* p) const { X509_EXTENSION_free(p); }
};
template <class T>
using Own = std::unique_ptr<T, Free>;

Error openssl_error(const std::string& what) {
  char text[160] = "no reason given";
  if (const auto e = ERR_get_error()) ERR_error_string_n(e, text, sizeof text);
  ERR_clear_error();
  return Error{EIO, what + ": " + text};
}

Own<EVP_PKEY> new_key() { return Own<EVP_PKEY>(EVP_EC_gen("P-256")); }

bool add_extension(X509* cert, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX ctx;
  X509V3_set_ctx_nodb(&ctx);
  X509V3_set_ctx(&ctx, issuer, cert, nullptr, nullptr, 0);
  Own<X509_EXTENSION> e(X509V3_EXT_conf_nid(nullptr, &ctx, nid, value.c_str()));
  return e && X509_add_ext(cert, e.get(), -1);
}

// A certificate without extensions and signature. issuer null: its own.
Own<X509> new_cert(EVP_PKEY* key, const std::string& cn, X509* issuer, long days) {
  Own<X509> cert(X509_new());
  unsigned char serial[16];
  if (!cert || RAND_bytes(serial, sizeof serial) != 1) return nullptr;
  serial[0] &= 0x7f;
  std::unique_ptr<BIGNUM, decltype(&BN_free)> bn(BN_bin2bn(serial, sizeof serial, nullptr), BN_free);
  X509_NAME* name = X509_get_subject_name(cert.get());
  constexpr long kClockSkewS = 3600;
  const bool ok = bn && BN_to_ASN1_INTEGER(bn.get(), X509_get_serialNumber(cert.get())) && X509_set_version(cert.get(), 2) &&
                  X509_gmtime_adj(X509_getm_notBefore(cert.get()), -kClockSkewS) &&
                  X509_gmtime_adj(X509_getm_notAfter(cert.get()), days * 86400) && X509_set_pubkey(cert.get(), key) &&
                  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(cn.c_str()),
                                             -1, -1, 0) &&
                  X509_set_issuer_name(cert.get(), issuer ? X509_get_subject_name(issuer) : name);
  return ok ? std::move(cert) : nullptr;
}

template <class Write>
Result<std::string> to_pem(Write write) {
  Own<BIO> bio(BIO_new(BIO_s_mem()));
  if (!bio || !write(bio.get())) return openssl_error("writing PEM");
  char* data = nullptr;
  const long n = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<std::size_t>(n));
}

Result<std::string> pem_of(EVP_PKEY* key) {
  return to_pem([&](BIO* b) { return PEM_write_bio_PrivateKey(b, key, nullptr, nullptr, 0, nullptr, nullptr); });
}

Result<std::string> pem_of(X509* cert) {
  return to_pem([&](BIO* b) { return PEM_write_bio_X509(b, cert); });
}

// Atomic, and never readable by others, not even for a moment.
Status write_file(const std::string& path, const Result<std::string>& text, mode_t mode) {
  if (!text) return text.error();
  const std::string tmp = path + ".new";
  unlink(tmp.c_str());
  const int fd = open(tmp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) return sys_error("cannot write " + tmp);
  const bool ok = write(fd, text->data(), text->size()) == static_cast<ssize_t>(text->size()) && !fchmod(fd, mode) && !fsync(fd);
  const int err = errno;
  close(fd);
  if (!ok || rename(tmp.c_str(), path.c_str())) return sys_error("cannot write " + path, ok ? errno : err);
  return {};
}

Status make_dir(const std::string& dir) {
  if (mkdir(dir.c_str(), 0700) && errno != EEXIST) return sys_error("cannot make " + dir);
  return {};
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return sys_error("cannot read " + path);
  std::ostringstream s;
  s << in.rdbuf();
  return s.str();
}

bool is_there(const std::string& path) { return !access(path.c_str(), F_OK); }

std::string keyless(const std::string& dir) { return dir + " holds ca.pem of a CA whose key is elsewhere: bring ca.key back, or name another folder"; }

bool host_name_ok(const std::string& n) {
  return !n.empty() && n.size() <= 63 && n[0] != '.' && n[0] != '-' &&
         std::all_of(n.begin(), n.end(), [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '.'; });
}

}  // namespace

Status init(const std::string& dir) {
  if (auto s = make_dir(dir); !s) return s;
  if (is_there(dir + "/ca.key")) return Error{EEXIST, dir + " holds a CA already (ca.key); remove it first if all hosts are to get new certificates"};
  if (is_there(dir + "/ca.pem")) return Error{EEXIST, keyless(dir)};
  const auto key = new_key();
  if (!key) return openssl_error("making a key");
  const auto cert = new_cert(key.get(), "migr CA", nullptr, kCaDays);
  if (!cert || !add_extension(cert.get(), cert.get(), NID_basic_constraints, "critical,CA:TRUE,pathlen:0") ||
      !add_extension(cert.get(), cert.get(), NID_key_usage, "critical,keyCertSign,cRLSign") ||
      !add_extension(cert.get(), cert.get(), NID_subject_key_identifier, "hash") ||
      !X509_sign(cert.get(), key.get(), EVP_sha256()))
    return openssl_error("making the CA's certificate");
  // The key first: what is interrupted holds no ca.pem of a key that is nowhere.
  if (auto s = write_file(dir + "/ca.key", pem_of(key.get()), 0600); !s) return s;
  return write_file(dir + "/ca.pem", pem_of(cert.get()), 0644);
}

Status issue_host(const std::string& dir, const std::string& name, const std::vector<std::string>& ips, long days) {
  if (!host_name_ok(name)) return Error{EINVAL, "'" + name + "' is no name for a host (letters, digits, - and .)"};
  std::string san = "DNS:" + name;
  for (const auto& ip : ips) {
    unsigned char buf[16];
    if (inet_pton(AF_INET, ip.c_str(), buf) != 1 && inet_pton(AF_INET6, ip.c_str(), buf) != 1)
      return Error{EINVAL, "'" + ip + "' is no IP address"};
    san += ",IP:" + ip;
  }
  const auto ca_pem = read_file(dir + "/ca.pem"), ca_key_pem = read_file(dir + "/ca.key");
  if (ca_pem && !is_there(dir + "/ca.key")) return Error{ENOENT, keyless(dir)};
  if (!ca_pem || !ca_key_pem) return Error{ENOENT, "no CA in " + dir + "; make one with: migrctl pki init " + dir};
  Own<BIO> cert_bio(BIO_new_mem_buf(ca_pem->data(), static_cast<int>(ca_pem->size())));
  Own<BIO> key_bio(BIO_new_mem_buf(ca_key_pem->data(), static_cast<int>(ca_key_pem->size())));
  const Own<X509> ca(PEM_read_bio_X509(cert_bio.get(), nullptr, nullptr, nullptr));
  const Own<EVP_PKEY> ca_key(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, nullptr, nullptr));
  if (!ca || !ca_key) return openssl_error("reading the CA in " + dir);

  const auto key = new_key();
  if (!key) return openssl_error("making a key");
  const auto cert = new_cert(key.get(), name, ca.get(), days);
  if (!cert || !add_extension(cert.get(), ca.get(), NID_basic_constraints, "critical,CA:FALSE") ||
      !add_extension(cert.get(), ca.get(), NID_key_usage, "critical,digitalSignature") ||
      !add_extension(cert.get(), ca.get(), NID_ext_key_usage, "serverAuth,clientAuth") ||
      !add_extension(cert.get(), ca.get(), NID_subject_alt_name, san) ||
      !add_extension(cert.get(), ca.get(), NID_authority_key_identifier, "keyid") ||
      !X509_sign(cert.get(), ca_key.get(), EVP_sha256()))
    return openssl_error("making the certificate of " + name);
  const std::string out = dir + "/" + name;
  if (auto s = make_dir(out); !s) return s;
  if (auto s = write_file(out + "/host.key", pem_of(key.get()), 0600); !s) return s;
  if (auto s = write_file(out + "/host.pem", pem_of(cert.get()), 0644); !s) return s;
  return write_file(out + "/ca.pem", ca_pem, 0644);
}

Result<Files> load(const std::string& dir) {
  const std::string key_path = dir + "/host.key";
  struct stat st;
  if (stat(key_path.c_str(), &st))
    return sys_error("cannot read " + key_path + " (make it with migrctl pki host, and copy it here)");
  if (st.st_mode & 077) return Error{EPERM, key_path + " is readable for others; chmod 600 it"};
  auto ca = read_file(dir + "/ca.pem"), cert = read_file(dir + "/host.pem"), key = read_file(key_path);
  for (const auto* r : {&ca, &cert, &key})
    if (!*r) return r->error();
  return Files{*ca, *cert, *key};
}

namespace {

// Of a file of one or more: a CA may be one of a chain.
std::vector<Own<X509>> certificates_in(const std::string& pem) {
  std::vector<Own<X509>> out;
  Own<BIO> bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  while (bio) {
    Own<X509> c(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (!c) break;
    out.push_back(std::move(c));
  }
  ERR_clear_error();  // that of the end
  return out;
}

std::int64_t unix_time(const ASN1_TIME* t) {
  tm at{};
  return ASN1_TIME_to_tm(t, &at) == 1 ? timegm(&at) : 0;
}

}  // namespace

Result<Certificate> read(const Files& files, const std::string& name) {
  const auto cas = certificates_in(files.ca), chain = certificates_in(files.cert);
  Own<BIO> bio(BIO_new_mem_buf(files.key.data(), static_cast<int>(files.key.size())));
  const Own<EVP_PKEY> key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr));
  ERR_clear_error();
  if (cas.empty() || chain.empty() || !key) return Error{EINVAL, std::string(cas.empty() ? "ca.pem" : chain.empty() ? "host.pem" : "host.key") + " is not in PEM"};
  X509* const cert = chain[0].get();
  Own<X509_STORE> trusted(X509_STORE_new());
  Own<X509_STORE_CTX> ctx(X509_STORE_CTX_new());
  std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> others(sk_X509_new_null(), [](STACK_OF(X509)* s) { sk_X509_free(s); });
  if (!trusted || !ctx || !others) return openssl_error("reading a certificate");
  for (const auto& c : cas) X509_STORE_add_cert(trusted.get(), c.get());
  for (const auto& c : chain) sk_X509_push(others.get(), c.get());
  X509_STORE_set_flags(trusted.get(), X509_V_FLAG_NO_CHECK_TIME);
  if (!X509_STORE_CTX_init(ctx.get(), trusted.get(), cert, others.get())) return openssl_error("reading a certificate");
  Certificate c;
  char subject[256] = "";
  X509_NAME_get_text_by_NID(X509_get_subject_name(cert), NID_commonName, subject, sizeof subject);
  c.subject = subject;
  c.begins_s = unix_time(X509_get0_notBefore(cert));
  c.ends_s = unix_time(X509_get0_notAfter(cert));
  c.ca_ends_s = unix_time(X509_get0_notAfter(cas[0].get()));
  c.of_ca = X509_verify_cert(ctx.get()) == 1;
  const auto* signers = X509_STORE_CTX_get0_chain(ctx.get());
  if (c.of_ca && signers) c.ca_ends_s = unix_time(X509_get0_notAfter(sk_X509_value(signers, sk_X509_num(signers) - 1)));
  c.of_key = X509_check_private_key(cert, key.get()) == 1;
  c.of_host = X509_check_host(cert, name.c_str(), name.size(), 0, nullptr) == 1;
  ERR_clear_error();
  return c;
}

Status check(const Certificate& c, const std::string& name, std::int64_t now_s) {
  const auto wrong = [](const std::string& what) { return Error{EINVAL, what}; };
  if (!c.of_key) return wrong("host.pem and host.key do not belong together");
  if (!c.of_ca) return wrong("host.pem is not signed by the CA in ca.pem");
  if (!c.of_host) return wrong("it is for '" + c.subject + "', and this host is '" + name + "'");
  if (now_s < c.begins_s) return wrong("it is not valid before " + local_time(c.begins_s));
  if (now_s >= c.ends_s) return wrong("it expired on " + local_time(c.ends_s).substr(0, 10));
  if (now_s >= c.ca_ends_s) return wrong("the CA expired on " + local_time(c.ca_ends_s).substr(0, 10));
  return {};
}

}  // namespace migr::pki
