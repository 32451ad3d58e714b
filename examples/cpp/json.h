// Reads JSON: what manifest.json and the header of a safetensors file take, and no more (no \u escapes beyond ASCII).
#pragma once

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {
  enum class Kind { null, boolean, number, text, list, object };
  Kind kind = Kind::null;
  double number = 0;  // of a boolean, 0 or 1
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  bool is_null() const { return kind == Kind::null; }
  bool is_text() const { return kind == Kind::text; }
  int64_t integer() const { return static_cast<int64_t>(number); }
  const Json& operator[](const std::string& name) const {
    auto found = fields.find(name);
    if (found == fields.end()) throw std::runtime_error("JSON: no field " + name);
    return found->second;
  }

  static Json parse(const std::string& source) {
    const char* at = source.c_str();
    Json value = read(at);
    skip(at);
    if (at != source.c_str() + source.size()) fail("something after the end");
    return value;
  }

 private:
  [[noreturn]] static void fail(const std::string& what) { throw std::runtime_error("JSON: " + what); }
  static void skip(const char*& at) {
    while (std::isspace(static_cast<unsigned char>(*at))) ++at;
  }
  static bool take(const char*& at, char letter) {
    skip(at);
    if (*at != letter) return false;
    ++at;
    return true;
  }
  static void word(const char*& at, const char* expected) {
    for (; *expected != '\0'; ++expected)
      if (*at++ != *expected) fail("expected true, false or null");
  }
  static Json read(const char*& at) {
    Json value;
    skip(at);
    if (*at == '{') {
      value.kind = Kind::object;
      ++at;
      if (take(at, '}')) return value;
      do {
        skip(at);
        std::string name = quoted(at);
        if (!take(at, ':')) fail("expected a colon");
        value.fields.emplace(std::move(name), read(at));
      } while (take(at, ','));
      if (!take(at, '}')) fail("expected the end of an object");
    } else if (*at == '[') {
      value.kind = Kind::list;
      ++at;
      if (take(at, ']')) return value;
      do value.items.push_back(read(at));
      while (take(at, ','));
      if (!take(at, ']')) fail("expected the end of a list");
    } else if (*at == '"') {
      value.kind = Kind::text;
      value.text = quoted(at);
    } else if (*at == 't' || *at == 'f') {
      value.kind = Kind::boolean;
      value.number = *at == 't';
      word(at, *at == 't' ? "true" : "false");
    } else if (*at == 'n') {
      word(at, "null");
    } else {
      char* end = nullptr;
      value.kind = Kind::number;
      value.number = std::strtod(at, &end);
      if (end == at) fail("expected a value");
      at = end;
    }
    return value;
  }
  static std::string quoted(const char*& at) {
    if (*at++ != '"') fail("expected a text");
    std::string found;
    for (; *at != '"'; ++at) {
      if (*at == '\0') fail("a text without an end");
      if (*at != '\\') {
        found += *at;
        continue;
      }
      switch (*++at) {
        case 'n': found += '\n'; break;
        case 't': found += '\t'; break;
        case 'r': found += '\r'; break;
        case 'b': found += '\b'; break;
        case 'f': found += '\f'; break;
        case 'u':
          found += static_cast<char>(std::strtol(std::string(at + 1, 4).c_str(), nullptr, 16));
          at += 4;
          break;
        default: found += *at;  // a quote, a slash, a backslash
      }
    }
    ++at;
    return found;
  }
};
